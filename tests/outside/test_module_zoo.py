"""Modules of every build: each trains as a plain PyTorch loop over the same batches does, or is refused by name."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import processes
import quick_run
from comparisons import state_of
from pflmpi import global_generators, outside, tree
from pflmpi.analysis.model import read_client_state_dict
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError, RunError
from pflmpi.experiment import build
from pflmpi.experiment.build import executor_of, prepare
from pflmpi.experiment.stored_config import stored_config
from pflmpi.models import MODELS
from pflmpi.models.module_parts import KeyedDropout, forward_pass
from pflmpi.models.noise import apply_dropout
from pflmpi.runtime.executors.base import Loop
from project import HELPERS

HERE = f"{__file__}:"
COUNT = 0


class Base(nn.Module):
    """Two layers; `body` maps [B, 64] to [B, 6]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 6)
        self.make()
        self.fc = self.head(num_classes)

    def make(self) -> None: ...

    def head(self, num_classes: int) -> nn.Module:
        return nn.Linear(6, num_classes)

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x.flatten(1)))


class Convolutional(Base):
    def make(self) -> None:
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(4))

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.conv(x.view(-1, 1, 8, 8)).flatten(1))


class Normed(Base):
    norm = staticmethod(lambda: nn.BatchNorm1d(6))

    def make(self) -> None:
        self.normed = self.norm()

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.normed(self.first(x)))


class CumulativeNorm(Normed):
    norm = staticmethod(lambda: nn.BatchNorm1d(6, momentum=None))


class LayerNormed(Normed):
    norm = staticmethod(lambda: nn.LayerNorm(6))


class GroupNormed(Normed):
    norm = staticmethod(lambda: nn.GroupNorm(2, 6))


class FrozenFirst(Base):
    def make(self) -> None:
        self.first.requires_grad_(False)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(super().body(x)))


class FrozenConvolutional(Convolutional):
    """Batch norm of what is frozen follows the batches, as in PyTorch."""

    def make(self) -> None:
        super().make()
        self.conv.requires_grad_(False)


class InstanceNormed(Convolutional):
    tracked = True

    def make(self) -> None:
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=self.tracked)
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(4))


class UntrackedInstances(InstanceNormed):
    tracked = False


class Untracked(Normed):
    norm = staticmethod(lambda: nn.BatchNorm1d(6, track_running_stats=False))


class Frozen(Normed):
    """Batch norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.normed.eval()
        return self


class Recurrent(Base):
    kind = nn.LSTM

    def make(self) -> None:
        self.rows = self.kind(8, 6, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        return self.rows(x.view(-1, 8, 8))[0][:, -1] + self.first(x)


class GatedRecurrent(Recurrent):
    kind = nn.GRU


class RecurrentCell(Base):
    def make(self) -> None:
        self.step = nn.LSTMCell(8, 6)

    def body(self, x: Tensor) -> Tensor:
        return self.step(x.view(-1, 8, 8)[:, 0])[0] + self.first(x)


class Attentive(Base):
    def make(self) -> None:
        self.rows = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        mask = torch.full((8, 8), -torch.inf).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("scale", torch.ones(8, dtype=torch.bfloat16), persistent=False)

    def body(self, x: Tensor) -> Tensor:
        return super().body((self.rows(x.view(-1, 8, 8), self.mask) * self.scale.float()).flatten(1))


class Normalised(Base):
    """Weight norm as a parametrisation."""

    def make(self) -> None:
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class OldNormalised(Base):
    def make(self) -> None:
        self.first = nn.utils.weight_norm(self.first)


class Spectral(Base):
    def make(self) -> None:
        self.first = nn.utils.parametrizations.spectral_norm(self.first)


class Scripted(Base):
    def make(self) -> None:
        self.second = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))

    def body(self, x: Tensor) -> Tensor:
        return self.second(super().body(x))


class OldSpectral(Base):
    def make(self) -> None:
        self.first = nn.utils.spectral_norm(self.first)


class Orthogonal(Base):
    def make(self) -> None:
        nn.utils.parametrizations.orthogonal(self.first)


class Listed(Base):
    def make(self) -> None:
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))])

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * self.scales[0] + self.scales[1]


class Tied(Base):
    """Two names of a layer, and a parameter in two layers."""

    def make(self) -> None:
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again, self.outer.weight = self.inner, self.inner.weight

    def body(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.again(self.inner(super().body(x)))))


class Masked(Base):
    """A hook that masks a gradient."""

    def make(self) -> None:
        self.register_buffer("kept", torch.arange(64) % 2.0)
        self.first.weight.register_hook(lambda gradient: gradient * self.kept)


class BackwardHooked(Base):
    def make(self) -> None:
        self.first.register_full_backward_hook(lambda module, grad_input, _: (grad_input[0], *grad_input[1:]))

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x * torch.ones((), requires_grad=True)))


class ForwardHooked(Base):
    def make(self) -> None:
        self.first.register_forward_hook(lambda module, inputs, output: 2 * output)


class Doubled(torch.autograd.Function):
    """Without `setup_context`, which vmap needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


class OwnFunction(Base):
    def body(self, x: Tensor) -> Tensor:
        return Doubled.apply(super().body(x))


class Checkpointed(Convolutional):
    def body(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().body, x, use_reentrant=False)


class Dropping(Base):
    def make(self) -> None:
        self.drop = nn.Dropout(0.5)

    def deep(self, x: Tensor) -> Tensor:
        return self.drop(super().body(x))

    def body(self, x: Tensor) -> Tensor:
        return self.deep(x)


class DroppingNothing(Dropping):
    def make(self) -> None:
        self.drop = nn.Dropout(0.0)


class SequenceFirst(Dropping):
    def deep(self, x: Tensor) -> Tensor:
        return self.drop(super(Dropping, self).body(x).mT).mT


class CheckpointedDropout(Dropping):
    def body(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.deep, x, use_reentrant=False)


class CheckpointedTwice(CheckpointedDropout):
    def deep(self, x: Tensor) -> Tensor:
        return self.drop(super().deep(x))


class Reentrant(Base):
    def body(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.first, x.requires_grad_(), use_reentrant=True)


class Cosine(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return 5 * F.linear(F.normalize(z), F.normalize(self.weight)) + self.bias


class CosineHead(Base):
    def head(self, num_classes: int) -> nn.Module:
        return Cosine(6, num_classes)


class SizedByHead(Base):
    """A forward pass that reads what a head is, besides calling it."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x.flatten(1).to(self.fc.weight.device)).to(self.fc.bias)
        return self.fc(z.to(self.fc.weight.dtype).view(-1, self.fc.in_features)[:, : self.fc.weight.shape[1]])


class ReadingHead(Base):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x) / self.fc.weight.norm()


class Scaled(nn.Linear):
    scale = 2.0


class ReadingOwnHead(Base):
    def head(self, num_classes: int) -> nn.Module:
        return Scaled(6, num_classes)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * self.fc.scale


class HookedHead(Base):
    def head(self, num_classes: int) -> nn.Module:
        layer = nn.Linear(6, num_classes)
        layer.weight.register_hook(lambda gradient: gradient / 2)
        return layer


class Renewed(Base):
    """A buffer that is given anew, while the forward pass still needs the old one."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(6))

    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        centred = z * (1 + self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        return centred


class Climbing(Base):
    """Samples that are moved along their gradient, in training."""

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            x = x.detach().requires_grad_()
            x = x + 0.1 * torch.autograd.grad(self.first(x).tanh().sum(), x, create_graph=True)[0]
        return super().body(x)


class CountedInPlace(Base):
    """An integer buffer that an annealing schedule reads."""

    def make(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().body(x) / (1 + self.steps)


class RandomFeatures(Base):
    """A constant that follows from the seed."""

    def make(self) -> None:
        self.register_buffer("projection", torch.randn(64, 64) / 8)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x @ self.projection)


class CountedInAttribute(Base):
    calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().body(x) / (1 + self.calls)


class Schedule:
    def __init__(self) -> None:
        self.step = 0

    def next(self) -> float:
        self.step += 1
        return 1 / self.step


class CountedInObject(Base):
    def make(self) -> None:
        self.schedule = Schedule()

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * (self.schedule.next() if self.training else 1)


class CountedByCount(Base):
    def make(self) -> None:
        self.steps = itertools.count(1)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) / (next(self.steps) if self.training else 1)


class Generating(CountedByCount):
    def make(self) -> None:
        self.steps = (min(1.0, 0.99**step) for step in range(1000))


class Cycling(CountedByCount):
    def make(self) -> None:
        self.steps = itertools.cycle([1.0, 1.0, 1.0, 1.0, 0.5])


class CountedInGlobal(Base):
    def body(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return super().body(x) / COUNT


class Remembering(Base):
    """What it keeps of one batch for the next."""

    last: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        mixed = z if self.last is None or len(self.last) != len(z) else z + 0.1 * self.last
        self.last = z.detach()
        return mixed


class Aliased(Base):
    """A parameter that is reached by another way than its name."""

    def make(self) -> None:
        self.held = [self.first]
        self.aliases = [self.first.weight]

    def body(self, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, self.aliases[0]))


class Auxiliary(Base):
    def forward(self, x: Tensor) -> Any:
        z = self.body(x.flatten(1))
        return (self.fc(z), z) if self.training else self.fc(z)


class DroppingScores(Base):
    def make(self) -> None:
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class NoisyHead(Base):
    def head(self, num_classes: int) -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(6, num_classes))


class Moving(Base):
    """Evaluation that changes a buffer."""

    def make(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().body(x)


class Functional(Base):
    def body(self, x: Tensor) -> Tensor:
        return F.dropout(super().body(x), 0.5, self.training)


class DropPath(nn.Module):
    """Stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) > 0.1) if self.training else x


class Deep(Base):
    def make(self) -> None:
        self.path = nn.Sequential(nn.Linear(64, 64), DropPath())

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.path(x))


class KeyedPath(DropPath):
    """As the error about the former says."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x.new_ones(len(x), 1)) * x


class KeyedDeep(Deep):
    def make(self) -> None:
        self.path = nn.Sequential(nn.Linear(64, 64), KeyedPath())


class Reinitialised(Base):
    """Parameters that a forward pass sets."""

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.first.weight.data *= 0.9
        return super().body(x)


class MaximalNorm(Base):
    """An embedding whose forward pass scales rows that are too long."""

    def make(self) -> None:
        self.levels = nn.Embedding(17, 64, max_norm=1.0)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.levels((8 * x + 8).long()).mean(1))


class Clamping(Base):
    """Bounds that no weight has met before the start."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-9, 9)
        return super().body(x)


class Monotone(Base):
    """Weights that a step makes negative."""

    def body(self, x: Tensor) -> Tensor:
        self.first.weight.data.clamp_(min=0)
        return super().body(x)


class Autocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class RegisteredLate(Base):
    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(z.shape[1]))
        return z * self.scale


class Shifting(Base):
    """An input that is changed in place."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x.sub_(0.5))


class DroppedTwice(Base):
    def make(self) -> None:
        self.drop = nn.Dropout(0.5)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(self.first(self.drop(x)))


class Looking(Base):
    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        return z if z.sum().item() > 0 else -z


class LateBuffer(Base):
    """A buffer that looks like a constant at first."""

    def make(self) -> None:
        self.register_buffer("offset", torch.zeros(6))

    def body(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 3:
            self.offset += 1
        return super().body(x) + self.offset


class LateProjection(LateBuffer):
    """The same of one that follows from the seed."""

    def make(self) -> None:
        self.register_buffer("offset", torch.randn(6))


class HalfState(Base):
    def make(self) -> None:
        self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().body(x)


class Accumulating(Base):
    def make(self) -> None:
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class Drawn(Base):
    """Weights from NumPy's global generator."""

    def make(self) -> None:
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(np.random.randn(6, 64)))


class DrawnWithoutSeed(Base):
    def make(self) -> None:
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(6, 64))))


class ConstantWithoutSeed(Base):
    def make(self) -> None:
        shift = torch.from_numpy(np.random.default_rng().normal(size=64)).float()
        self.register_buffer("shift", shift, persistent=False)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.get_buffer("shift"))


class Lazy(Base):
    def make(self) -> None:
        self.first = nn.LazyLinear(6)


class Slashed(Base):
    def make(self) -> None:
        self.parts = nn.ModuleDict({"a/b": nn.Linear(64, 64)})

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.parts["a/b"](x))


class Unstorable(Base):
    def make(self) -> None:
        self.parts = nn.ModuleDict({"a\0b": nn.Linear(64, 64)})

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.parts["a\0b"](x))


class TiedHead(Base):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.again = self.fc


class DroppingInEvaluation(Dropping):
    """Monte Carlo dropout."""

    def train(self, mode: bool = True) -> "DroppingInEvaluation":
        super().train(mode)
        self.drop.train()
        return self


class DroppingMore(Dropping):
    """A probability that a forward pass changes."""

    def deep(self, x: Tensor) -> Tensor:
        if self.training:
            self.drop.p = min(0.9, self.drop.p * 1.2)
        return super().deep(x)


class DroppingAttention(Base):
    def make(self) -> None:
        self.rows = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.rows(x.view(-1, 8, 8)).flatten(1))


class DroppingRecurrent(Base):
    def make(self) -> None:
        self.rows = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.1)

    def body(self, x: Tensor) -> Tensor:
        return self.rows(x.view(-1, 8, 8))[0][:, -1]


class DroppingChannels(Base):
    def make(self) -> None:
        self.drop = nn.Dropout1d(0.1)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.drop(x.view(-1, 8, 8)).flatten(1))


class Leaky(Base):
    def make(self) -> None:
        self.act = nn.RReLU()

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))


class Packed(nn.Module):
    """A classifier of texts whose padding is 0, and which no text without a word can pass."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words, self.rows = nn.Embedding(9, 4, padding_idx=0), nn.GRU(4, 6, batch_first=True)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        lengths = (x != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.rows(packed)[1][0])


class Unconverted(Packed):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rows(self.words(x))[1][0])


class Detached(Base):
    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = super().body(x)
        return self.second(z)

    def make(self) -> None:
        self.second = nn.Linear(6, 6)


class Probed(Base):
    """A linear probe of features that have no gradient."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().body(x)


class FrozenProbed(Probed):
    def make(self) -> None:
        self.first.requires_grad_(False)


class Summed(Base):
    """A sum of embeddings, whose gradient adds up rows in an order that depends on all indices of the batch."""

    def make(self) -> None:
        self.first = nn.EmbeddingBag(18, 6, mode="sum")

    def body(self, x: Tensor) -> Tensor:
        return self.first(((x + 1) * 8).long().clamp(0, 17))


class Sparse(Summed):
    def make(self) -> None:
        self.first = nn.EmbeddingBag(18, 6, mode="sum", sparse=True)


class Rescaled(Base):
    """In training features are shares of the largest one of the batch."""

    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        return z / (1 + z.detach().max()) if self.training else z


class Frequent(nn.Module):
    """The gradient of a token is divided by how often it is in the batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0, scale_grad_by_freq=True)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.words(x.long()).sum(1).tanh())


class Pooled(Frequent):
    """The mean of the words of a text, of which each has one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.words.weight[x.long()].mul((x > 0).unsqueeze(-1)).sum(1) / (x > 0).sum(1, keepdim=True))


class Idle(Base):
    def make(self) -> None:
        self.second = nn.Linear(6, 6)


class Routed(Base):
    """Each sample chooses one of two layers; in some batches all choose the same."""

    def make(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        z = super().body(x)
        chosen = (x.reshape(len(x), -1)[:, 20] > 0.9).long()
        out = torch.zeros_like(z)
        for number, expert in enumerate(self.experts):
            if (mask := chosen == number).any():
                out = out.index_put((mask.nonzero()[:, 0],), expert(z[mask]))
        return out


TRAINED = [
    Base, Convolutional, Normed, CumulativeNorm, LayerNormed, GroupNormed, InstanceNormed, Frozen, FrozenFirst,
    FrozenConvolutional, Recurrent, GatedRecurrent, RecurrentCell,
    Attentive, Normalised, OldNormalised, Spectral, Scripted, Orthogonal, Listed, Tied, Masked, BackwardHooked,
    ForwardHooked, OwnFunction, Checkpointed, CheckpointedDropout, CosineHead, SizedByHead, HookedHead, Renewed,
    Climbing, CountedInPlace, RandomFeatures, DroppingNothing, DroppedTwice, KeyedDeep, Looking,
    Detached, Probed, FrozenProbed, Idle, Routed,
]  # fmt: skip
DROPPING = (CheckpointedDropout, DroppedTwice, KeyedDeep)  # their masks are ours
SEVERAL = (*DROPPING, CumulativeNorm, Checkpointed, Renewed, CosineHead)  # which could tell one rank from two
REFUSED = {
    ConstantWithoutSeed: "model ConstantWithoutSeed has another shift when it is built again with the same seed",
    DrawnWithoutSeed: "model DrawnWithoutSeed has another first.weight when it is built again with the same seed",
    Untracked: "model Untracked scores a sample otherwise alone than beside others",
    CheckpointedTwice: "drop of the module is called 2 times in a forward pass, and computed again",
    Reentrant: "use_reentrant",
    CountedInAttribute: "model CountedInAttribute changes calls in a forward pass in training",
    CountedInObject: r"model CountedInObject changes schedule.step in a forward pass",
    CountedByCount: "model CountedByCount changes steps in a forward pass in training",
    Generating: "steps of the module is a generator: an iterator, .* count in a buffer",
    Cycling: "steps of the module is a cycle: an iterator",
    CountedInGlobal: "model CountedInGlobal changes global COUNT in a forward pass",
    Remembering: "model Remembering changes last in a forward pass",
    Aliased: "body/first/weight of client 0 does not move, .*a parameter that is also reached by another way",
    Auxiliary: "model Auxiliary returns a tuple in training; forward must return scores",
    DroppingScores: "model DroppingScores does not end with fc in training",
    ReadingHead: "forward of the module reads fc's values besides calling it; .* in_features, out_features",
    ReadingOwnHead: "model ReadingOwnHead cannot be trained: forward of the module reads fc.scale besides calling it",
    OldSpectral: "first of the module has nn.utils.spectral_norm, .* use nn.utils.parametrizations.spectral_norm",
    NoisyHead: "model.head = 'fc' has a buffer, parametrizations.weight.0._u",
    Moving: "model Moving changes seen in a forward pass in evaluation",
    Functional: "model Functional draws from a global generator of random numbers in its forward pass, so",
    Deep: r"model Deep draws .* in path.1, called in its forward pass, so .*self.drop.x.new_ones.len.x., 1, 1, 1.. . x",
    Reinitialised: "model Reinitialised changes first.weight in a forward pass in training",
    MaximalNorm: "model MaximalNorm changes levels.weight in a forward pass in evaluation",
    Clamping: "model Clamping changes first.weight in a forward pass in evaluation",
    Monotone: "model Monotone changes body/first/weight in a forward pass in evaluation, once it is trained",
    Autocast: "model Autocast computes fc in bfloat16; .* end torch.autocast before fc",
    RegisteredLate: "model RegisteredLate registers scale in a forward pass; register it in __init__",
    Shifting: "model Shifting changes its input in place, .* compute a new tensor",
    HalfState: "seen of model HalfState is a buffer of bfloat16, which checkpoints cannot hold",
    Accumulating: "first.weight of the module has a hook for accumulated gradients",
    LateBuffer: "model LateBuffer changes its buffer offset in a forward pass",
    LateProjection: "model LateProjection changes its buffer offset in a forward pass, but did not before the start",
    Lazy: "first.weight of the module has no size before its first call",
    Slashed: "parts.a/b.weight of the module has a / in its name, .*; leave it out",
    Unstorable: r"'parts.a\\x00b.weight' of the module has a character that no checkpoint can store; leave it out",
    TiedHead: "again.weight and the head fc of the module are one parameter",
    DroppingInEvaluation: "drop of the module drops in evaluation, .* let train.False. of the module put every",
    DroppingMore: "model DroppingMore changes drop.p in a forward pass in training",
    DroppingAttention: "draws .* in rows.self_attn, called in its forward pass, .* set dropout of attention .* to 0",
    DroppingRecurrent: "draws .* in rows, called in its forward pass, so .* recurrent layers to 0",
    DroppingChannels: "draws .* in drop, called in its forward pass, so .* use nn.Dropout, whose masks follow",
    Leaky: "draws .* in act, called in its forward pass, so .* use nn.Dropout",
}


TRAINING = {
    "rounds": 1,
    "epochs": 1,
    "momentum": 0.5,
    "weight_decay": 0.1,
    "lr": 0.05,
    "participation": 1.0,
    "batch_size": 4,
    "drop_last": True,
}


def settings(kind, **sections):
    model = {"name": HERE + kind.__name__, "head": "fc", **sections.pop("options", {})}
    return quick_run.settings(model=model, **{"algorithm": {"name": "local"}, "training": TRAINING, **sections})


@pytest.fixture(autouse=True)
def calm():
    """Warnings of torch about its older parts are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}


def plain(kind, initial, batches, optimizer="sgd"):
    """Parameters and buffers before and after a loop as anybody writes it, by their names in the module."""
    with global_generators.seeded(0):
        module = kind(10)
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for path, leaf in tree.leaves(initial):
            part, _, name = path.replace("/", ".").partition(".")
            values[f"fc.{name}" if part == "head" else name].copy_(leaf)
    before = {name: value.detach().clone() for name, value in values.items()}
    steps = OPTIMIZERS[optimizer](module.parameters())
    module.train()
    for batch in batches:
        steps.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        steps.step()
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return before, {name: value.detach() for name, value in after.items()}


def on_processes(raw, folder):
    """The digest of a run of two ranks, each a process."""
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    words = ["run", str(folder / "config.yaml"), "--ranks", "2", "--out", str(folder / "1")]
    here = {**processes.ENVIRONMENT, "PYTHONPATH": str(HELPERS)}  # by which ranks import this file
    done = processes.call([*processes.PFLMPI, *words], env=here)
    assert done.returncode == 0, done.stderr
    return quick_run.digest(folder / "1")


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.__name__)
def test_a_module_is_trained_as_plain_pytorch_trains_it(kind, tmp_path):
    raw = settings(kind)
    # To recompute a part PyTorch sets the generator of the process, which ranks that are threads would share.
    alone = kind in (Checkpointed, CheckpointedDropout)
    digest = on_processes(raw, tmp_path) if alone else quick_run.run(raw, tmp_path / "1", 2)
    if kind in SEVERAL:
        assert quick_run.run(raw, tmp_path / "2") == digest
    if kind not in DROPPING:
        check_as_plain(kind, raw, tmp_path / "1")


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("kind", [Base, Detached, Idle], ids=lambda kind: kind.__name__)
def test_so_do_adam_and_adamw_also_where_a_parameter_has_no_gradient(kind, optimizer, executor, tmp_path):
    training = {**TRAINING, "optimizer": optimizer, "momentum": 0.0}
    raw = settings(kind, training=training, runtime={"executor": executor})
    quick_run.run(raw, tmp_path)
    check_as_plain(kind, raw, tmp_path, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_sparse_gradients_are_those_of_a_dense_layer(optimizer, tmp_path):
    training = {**TRAINING, "optimizer": optimizer, "momentum": 0.0, "clip_norm": 1.0}
    for kind, executor in ((Sparse, "auto"), (Summed, "loop")):
        quick_run.run(settings(kind, training=training, runtime={"executor": executor}), tmp_path / kind.__name__)
    sparse, dense = (state_of(tmp_path / kind.__name__, 1) for kind in (Sparse, Summed))
    for path, array in dense.items():  # 1e-6: float32 sums in another order
        np.testing.assert_allclose(sparse[path], array, atol=1e-6, err_msg=path)


def test_adam_is_refused_where_a_parameter_has_a_gradient_in_some_steps_alone(tmp_path):
    with pytest.raises(RunError, match="has a gradient in some steps of a training and none in others"):
        quick_run.run(settings(Routed, training={**TRAINING, "optimizer": "adam", "momentum": 0.0}), tmp_path)


def check_as_plain(kind, raw, folder, optimizer="sgd"):
    """Both clients' models after round 1 are those of a loop as anybody writes it."""
    state = state_of(folder, 1)
    experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    executor = executor_of(experiment, Loop)
    oracle = outside.load(HERE + kind.__name__)
    for client in (0, 1):
        data = executor._data(client, 1, executor.passes(np.array([client]), 1), {})
        task = experiment.tasks[0]
        before, after = plain(oracle, task.whole(task.init()), data.passes["train"], optimizer)
        moved = 0
        for path, rows in state.items():
            part, _, name = path.removeprefix("clients/model/").replace("/", ".").partition(".")
            name = f"fc.{name}" if part == "head" else name
            apart = np.abs(rows[client] - after[name].numpy()).max()
            move = float((after[name].double() - before[name].double()).abs().max())
            assert apart <= 1e-6 + 1e-3 * move, f"{path} of client {client} is off by {apart}, and moves by {move}"
            moved += move > 0
        assert moved > (1 if issubclass(kind, Probed) else 2), "more than the head moves, unless only that is trained"


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_module_that_would_be_trained_otherwise_is_refused_by_name(kind, tmp_path):
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        quick_run.run(settings(kind), tmp_path / "run")


@pytest.mark.parametrize("kind", [OwnFunction, BackwardHooked, Looking, Masked], ids=lambda kind: kind.__name__)
def test_what_suits_no_lanes_is_computed_in_a_loop_or_refused_in_lanes(kind, tmp_path, caplog):
    automatic = settings(kind, runtime={"executor": "auto"})
    digest = quick_run.run(automatic, tmp_path / "1", 2)
    assert (f"model {kind.__name__} in lanes: " in caplog.text) == (kind is not Masked), "its hook is known before"
    assert stored_config(tmp_path / "1", ()).runtime.executor == "loop"
    assert quick_run.run(settings(kind, runtime={"executor": "loop"}), tmp_path / "2") == digest
    with pytest.raises(ConfigError, match=f"model {kind.__name__} in lanes: .*runtime.executor = 'loop'"):
        quick_run.run(settings(kind, runtime={"executor": "lanes"}), tmp_path / "3")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_module_whose_bits_depend_on_padding_is_computed_in_a_loop_or_refused_in_lanes(tmp_path, caplog):
    quick_run.run(settings(Summed, runtime={"executor": "auto"}), tmp_path / "1")
    assert "the training of model Summed depends on images and labels in the padding" in caplog.text
    assert stored_config(tmp_path / "1", ()).runtime.executor == "loop"
    with pytest.raises(ConfigError, match=r"the training of model Summed depends on .*runtime.executor = 'loop'"):
        quick_run.run(settings(Summed, runtime={"executor": "lanes"}), tmp_path / "2")


@pytest.mark.parametrize("module", [Recurrent, RecurrentCell])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "fedproto"])
def test_a_recurrent_module_is_the_same_in_lanes_and_in_a_loop(algorithm, module, tmp_path):
    """With FedPer each client is tested with a model of its own; FedProto also computes features without training."""
    for executor in ("auto", "lanes"):
        sections = {"algorithm": {"name": algorithm}, "runtime": {"executor": executor, "lanes": 2}}
        raw = settings(module, training={**TRAINING, "steps": 12}, **sections)
        quick_run.run(raw, tmp_path / executor)
    assert stored_config(tmp_path / "auto", ()).runtime.executor == "loop"
    loop, lanes = (state_of(tmp_path / executor, 1) for executor in ("auto", "lanes"))
    assert loop.keys() == lanes.keys() and loop
    for path, array in loop.items():
        np.testing.assert_allclose(array, lanes[path], atol=1e-5, err_msg=path)


def test_a_constant_that_follows_from_the_seed_is_no_batch_norm(tmp_path):
    for executor in ("auto", "loop"):
        training = {**TRAINING, "micro_batch": 2, "drop_last": False}
        raw = settings(RandomFeatures, algorithm={"name": "fedavg"}, training=training, runtime={"executor": executor})
        quick_run.run(raw, tmp_path / executor)
    assert stored_config(tmp_path / "auto", ()).runtime.executor == "lanes"
    lanes, loop = (state_of(tmp_path / executor, 1) for executor in ("auto", "loop"))
    for path, array in loop.items():
        np.testing.assert_allclose(array, lanes[path], atol=1e-5, err_msg=path)


def settings_of_texts(kind, folder):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (60, 5)) * (np.arange(5) < rng.integers(1, 6, (60, 1)))
    np.savez(folder / "texts.npz", x=x, y=x[:, 0] % 2, client=np.arange(60) % 3)
    data = {"name": "texts", "path": str(folder / "texts.npz"), "limit": None}
    return settings(kind, data=data, partition={"name": "writers", "clients": None})


def test_a_module_for_tokens_is_tried_with_samples_of_the_data(tmp_path):
    raw = settings_of_texts(Packed, tmp_path)
    quick_run.run(raw, tmp_path / "run")
    with np.load(raw["data"]["path"]) as file:
        table = np.c_[file["x"], file["client"], file["y"]]
    np.savetxt(tmp_path / "texts.csv", table, "%d", ",", header="a,b,c,d,e,client,y", comments="")
    quick_run.run({**raw, "data": {**raw["data"], "path": str(tmp_path / "texts.csv")}}, tmp_path / "of table")
    several = [raw["model"], settings_of_texts(Pooled, tmp_path)["model"]]
    quick_run.run(quick_run.settings(raw, model=several, algorithm={"name": "local"}), tmp_path / "several models")
    with pytest.raises(ConfigError, match="of 5, made up with values from 0 to 1: Length of all samples"):
        MODELS[f"{HERE}Packed"](head="fc").bind((5,), 2)
    with pytest.raises(ConfigError, match=r"of 5: Expected .* samples are float32, of which x.long"):
        quick_run.run(settings_of_texts(Unconverted, tmp_path), tmp_path / "other")


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [Rescaled, Frequent], ids=lambda kind: kind.__name__)
def test_a_module_that_computes_from_samples_in_the_padding_is_computed_in_a_loop(kind, check, tmp_path):
    raw = settings(kind, algorithm={"name": "fedavg"}) if kind is Rescaled else settings_of_texts(kind, tmp_path)
    for seed in range(3):
        sections = {"model": {"check": check}, "runtime": {"executor": "auto"}, "seed": seed}
        quick_run.run(quick_run.settings(raw, **sections), tmp_path / str(seed))
        assert stored_config(tmp_path / str(seed), ()).runtime.executor == "loop"
    with pytest.raises(ConfigError, match=f"model {kind.__name__} .*padding of a batch.* runtime.executor"):
        quick_run.run(quick_run.settings(raw, **{**sections, "runtime": {"executor": "lanes"}}), tmp_path / "lanes")


def test_a_module_for_tokens_that_masks_its_padding_is_computed_in_lanes(tmp_path):
    raw = quick_run.settings(settings_of_texts(Pooled, tmp_path), runtime={"executor": "auto"})
    quick_run.run(raw, tmp_path / "run")
    assert stored_config(tmp_path / "run", ()).runtime.executor == "lanes"


def test_a_batch_of_one_sample_is_told_how_to_be_left_out(tmp_path):
    raw = settings(Normed, training={**TRAINING, "batch_size": 1})
    with pytest.raises(RunError, match=r"more than 1 value per channel.*drop_last = true .*pflmpi fork.*model.norm"):
        quick_run.run(raw, tmp_path / "run")


def test_what_a_module_draws_from_numpy_follows_from_the_seed(tmp_path):
    alone = quick_run.run(settings(Drawn), tmp_path / "1")
    np.random.rand()  # as another program would have done
    assert quick_run.run(settings(Drawn), tmp_path / "2", 2) == alone


def test_the_choice_of_rank_0_holds_for_all_and_at_resume(tmp_path, monkeypatch):
    """The second rank and the resumed run compare nothing."""
    digest = quick_run.run(settings(Looking, training={**TRAINING, "rounds": 2}), tmp_path / "whole", 2)
    checked = []
    compare = build.check_modules
    monkeypatch.setattr(build, "check_modules", lambda *args: checked.append(args) or compare(*args))
    quick_run.run(settings(Looking), tmp_path / "parts", 2)
    assert quick_run.resume(tmp_path / "parts", ("training.rounds=2",)) == digest
    assert len(checked) == 1


def test_a_layer_of_dropout_draws_anew_in_each_call():
    layer, x = KeyedDropout(0.5, 0, False, "drop"), torch.ones(50)
    key = torch.tensor(7)
    with forward_pass([layer], key):
        first, second = layer(x), layer(x)
    with forward_pass([layer], key):
        next_pass = layer(x)
    recomputed = layer(x)  # of a pass that called it once
    assert torch.equal(first, apply_dropout(x, key, 0.5, 0)), "the bits of a layer that is called once"
    assert torch.equal(first, next_pass) and torch.equal(first, recomputed) and not torch.equal(first, second)
    with forward_pass([layer], None), pytest.raises(ConfigError, match="drop of the module drops in evaluation"):
        layer(x)  # which a module has put in training mode since the start


def test_dropout_of_nothing_is_no_noise():
    noise = [
        MODELS[f"{HERE}{kind.__name__}"](head="fc").bind((64,), 10).draws_noise for kind in (Dropping, DroppingNothing)
    ]
    assert noise == [True, False]


def test_masks_over_a_batch_on_another_axis_are_not_the_algorithms(tmp_path):
    lanes = quick_run.run(settings(SequenceFirst, runtime={"executor": "lanes"}), tmp_path / "lanes")
    assert quick_run.run(settings(SequenceFirst, runtime={"executor": "lanes"}), tmp_path / "two", 2) == lanes


def test_recomputing_dropout_changes_no_gradient(tmp_path):
    """A checkpointed body and the same body without, which has the same layers of dropout."""
    kinds, loop = (CheckpointedDropout, Dropping), {"executor": "loop"}
    digests = [quick_run.run(settings(kind, runtime=loop), tmp_path / kind.__name__) for kind in kinds]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("algorithm", ["apfl", "fedcp"])
def test_recomputing_sees_the_weights_that_a_loss_was_called_with(algorithm, tmp_path):
    """A loss that calls the module with several sets of them, which recompute one after the other."""
    states: list[dict[str, np.ndarray]] = []
    for kind in (Convolutional, Checkpointed):
        raw = settings(kind, algorithm={"name": algorithm}, runtime={"executor": "loop"})
        quick_run.run(raw, tmp_path / kind.__name__)
        states.append(state_of(tmp_path / kind.__name__, 1))
    for path, array in states[0].items():
        if "running" not in path:  # batch norm inside is counted twice, as in plain PyTorch
            np.testing.assert_array_equal(array, states[1][path], err_msg=path)


def test_in_bfloat16_a_module_stays_near_what_it_is_in_float32(tmp_path):
    states = []
    for precision in ("fp32", "bf16"):
        raw = settings(Checkpointed, training={**TRAINING, "precision": precision})
        quick_run.run(raw, tmp_path / precision)
        states.append(state_of(tmp_path / precision, 1))
    for path, array in states[0].items():
        assert np.linalg.norm(states[1][path] - array) <= 0.05 * np.linalg.norm(array), path


@pytest.mark.parametrize("kind", [Frozen, LayerNormed, GroupNormed, UntrackedInstances], ids=lambda k: k.__name__)
def test_in_bfloat16_norms_in_lanes_agree_with_the_loop(kind, tmp_path):
    training, states = {**TRAINING, "steps": 2, "batch_size": 10, "precision": "bf16"}, []
    for executor in ("loop", "lanes"):
        quick_run.run(settings(kind, training=training, runtime={"executor": executor}), tmp_path / executor)
        states.append(state_of(tmp_path / executor, 1))
    for path, array in states[0].items():
        np.testing.assert_allclose(states[1][path], array, rtol=0, atol=2**-8, err_msg=path)  # bits of the mantissa


@pytest.mark.parametrize("algorithm", ["fedcp", "fedfcd", "fedgh", "fedgmh"])
def test_algorithms_that_compute_with_the_heads_matrix_refuse_another_head(algorithm, tmp_path):
    with pytest.raises(ConfigError, match=r"(computes with|adds) .*model CosineHead has a head with"):
        quick_run.run(settings(CosineHead, algorithm={"name": algorithm}), tmp_path / "run")


def test_constants_are_no_state_and_what_training_changes_is():
    for kind, stats in ((Attentive, []), (Normed, ["running_mean", "running_var"]), (RandomFeatures, ["projection"])):
        initial = MODELS[HERE + kind.__name__](head="fc").bind((1, 8, 8), 10).init(np.random.default_rng(0))
        names = [path.rpartition("/")[2] for path, _ in tree.leaves(tree.part(initial, "stats"))] if stats else []
        assert names == stats and ("stats" in initial) == bool(stats)


@pytest.mark.parametrize("kind", [CumulativeNorm, CountedInPlace], ids=lambda kind: kind.__name__)
def test_a_count_travels_with_fedavg(kind, tmp_path):
    raw = settings(kind, algorithm={"name": "fedavg"}, training={**TRAINING, "rounds": 2})
    assert quick_run.run(raw, tmp_path / "1") == quick_run.run(raw, tmp_path / "2", 2)


@pytest.mark.parametrize("kind", [Tied, Attentive, Normed, CosineHead, Normalised, Recurrent], ids=lambda k: k.__name__)
def test_an_export_is_the_modules_own_state_dict(kind, tmp_path, monkeypatch):
    quick_run.run(settings(kind), tmp_path / "run")
    oracle = outside.load(HERE + kind.__name__)(10)
    monkeypatch.setattr(outside, "load", lambda reference: pytest.fail("an export runs no code of the user's"))
    assert main(["export", str(tmp_path / "run"), "--client", "1", "-o", str(tmp_path / "one.pt")]) == 0
    exported = torch.load(tmp_path / "one.pt", weights_only=True)
    assert list(exported) == list(oracle.state_dict())
    oracle.load_state_dict(exported, strict=True)
    state = state_of(tmp_path / "run", 1)
    head = "clients/model/head/bias"
    assert np.array_equal(oracle.fc.bias.detach().numpy(), state[head][1])
    (tmp_path / "run" / "modules.h5").unlink()
    with pytest.raises(CheckpointError, match=r"modules.h5 is missing"):
        read_client_state_dict(open_run(tmp_path / "run").round(), 1)


def test_the_comparison_can_be_switched_off(tmp_path):
    quick_run.run(settings(Aliased, options={"check": False}), tmp_path / "run")

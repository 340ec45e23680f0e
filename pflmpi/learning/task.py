"""The learning task as algorithms see it: initial weights, features, logits."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.data.task_kinds import CLASSIFICATION, TaskKind
from pflmpi.learning.local_training import LocalTraining
from pflmpi.learning.parts import group_by_layer, overlay
from pflmpi.learning.training import TrainingConfig
from pflmpi.models.base import Architecture
from pflmpi.models.float32_norms import Float32Norms
from pflmpi.models.frozen import Frozen, remove_paths
from pflmpi.rng import stream
from pflmpi.tree import Tree

HOST = torch.device("cpu")
SERVER = -1  # in place of a client's id


class FirstModels(Protocol):
    """Stored models from which a run starts instead of drawn ones."""

    @property
    def own(self) -> bool:
        """Whether there is one model per client."""

    def model(self, client: int, like: Tree) -> Tree:
        """The initial arrays of a client's model, or of the `SERVER`'s; arrays that it lacks are drawn."""


@dataclass(frozen=True)
class Task:
    """The learning problem as an algorithm sees it; except for `init` the same for all clients of a cohort.

    A *model* is a tree `{"body": ..., "head": {"weight": [K, d], "bias": [K]}}`, with `"stats"` if the architecture
    has batch norm. Frozen parameters are not in it: `features` and `logits` add them.

    Attributes:
        frozen: parameters that no client trains.
        personal: paths of the parameters that stay with a client, by `model.personal`; () if it is not set.
        cached_features: whether samples are already features [..., d] of the body, as with `model.cache_features`.
        kind: what is predicted.
        label_shape: of a label; () for a class.
    """

    architecture: Architecture
    training: TrainingConfig
    num_clients: int
    seed: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: torch.device = HOST
    frozen: Frozen = field(default_factory=Frozen)
    personal: tuple[str, ...] = ()
    cached_features: bool = False
    kind: TaskKind = CLASSIFICATION
    label_shape: tuple[int, ...] = ()
    batched: bool = False  # inside a vmapped call, where gradients need torch.func
    local: LocalTraining | None = field(default=None, compare=False)  # set while a client trains
    client: int = SERVER  # whose initial model `init` returns; see `of_client`
    first: FirstModels | None = field(default=None, compare=False)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.architecture.num_classes

    @property
    def score_shape(self) -> tuple[int, ...]:
        """Shape of a sample's scores: (K,), or (T, K) for tokens."""
        return (*self.kind.score_axes(self.label_shape), self.num_classes)

    @property
    def num_features(self) -> int:
        """d, the width of a feature vector."""
        return self.architecture.num_features

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of a sample's features: (d,), or (T, d) for tokens."""
        return (*self.score_shape[:-1], self.num_features)

    def init(self) -> Tree:
        """The initial model, on the host: the server's, or that of the client whose task this is."""
        if self.training.init == "per_client":
            drawn = remove_paths(self.architecture.init(stream(self.seed, 0, self.client, "init")), self.frozen.paths)
        else:
            drawn = tree.clone(_init_shared(self.architecture, self.frozen.paths, self.seed))
        return drawn if self.first is None else overlay(drawn, self.first.model(self.client, drawn))

    @property
    def init_per_client(self) -> bool:
        """Whether clients start from different models: `training.init: per_client`, or those of another run."""
        return self.training.init == "per_client" or (self.first is not None and self.first.own)

    def of_client(self, client: int) -> "Task":
        """The task whose `init` is a client's: its own with `init_per_client`, else the server's."""
        return self.replace(client=client) if self.init_per_client else self

    def like(self, *parts: str) -> Tree:
        """The template of a model, or of some of its parts; parts that it lacks are left out."""
        template = _template(self.architecture, self.frozen.paths)
        return {part: template[part] for part in (parts or tuple(template)) if part in template}

    def whole(self, model: Tree) -> Tree:
        """A model with its frozen parameters."""
        return overlay(self.frozen.on(self.device), model) if self.frozen.paths else model

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Paths of the trained parameters of each layer, in forward order; layers without any are left out."""
        owned = group_by_layer(self.architecture.layers, self.like("body", "head"))
        return {layer: paths for layer, paths in owned.items() if paths}

    @property
    def shared_stats(self) -> tuple[str, ...]:
        """The model part that travels with the body when batch-norm statistics are averaged."""
        return ("stats",) if "stats" in self.like() and self.training.bn == "average" else ()

    @property
    def local_stats(self) -> tuple[str, ...]:
        """The model part that stays with the client when batch-norm statistics are local."""
        return ("stats",) if "stats" in self.like() and self.training.bn == "local" else ()

    @property
    def normalisation(self) -> dict[str, np.ndarray]:
        """Mean and standard deviation [C] by which `prepare` normalises, float64."""
        return {"mean": np.array(self.mean), "std": np.array(self.std)}

    def prepare(self, images: Tensor) -> Tensor:
        """Images [..., C, H, W] (uint8), or other samples (float32), as normalised floats; features unchanged."""
        if self.cached_features:
            return images
        x, num_axes = images.float(), len(self.architecture.shape)
        if images.dtype != torch.uint8:
            if not any(self.mean) and set(self.std) == {1.0}:
                return x
            shape = (-1, *(1,) * (num_axes - 1))  # by tensors, since a table may have many columns
            mean, std = (torch.tensor(values, device=x.device).view(shape) for values in (self.mean, self.std))
            return x.sub(mean).div_(std)
        if len(set(self.mean)) == len(set(self.std)) == 1:  # one multiply and add instead of broadcasting
            return x.mul_(1 / (255 * self.std[0])).sub_(self.mean[0] / self.std[0])
        x.div_(255)
        for channel, (center, width) in enumerate(zip(self.mean, self.std, strict=True)):
            x.select(-num_axes, channel).sub_(center).div_(width)  # by numbers: tensors would be copied to the device
        return x

    def features(self, model: Tree, x: Tensor, training: bool = False) -> Tensor:
        """z = f(body; x), [B, d] in float32, for prepared images x; x itself if it is features already."""
        if self.cached_features:
            return x
        with self._precision():
            z = self.architecture.features(self.whole(model), x, training)
        return z if z.dtype == torch.float32 else z.float()

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        """h(head; z), [B, K] in float32."""
        with self._precision():
            scores = self.architecture.logits(tree.part(self.whole({"head": head}), "head"), z)
        return scores if scores.dtype == torch.float32 else scores.float()

    def predict(self, model: Tree, x: Tensor, training: bool = False) -> Tensor:
        """The logits [B, K] of a whole model."""
        return self.logits(tree.part({"head": {}, **model}, "head"), self.features(model, x, training))

    def replace(self, **changes: object) -> "Task":
        """A copy with other fields, such as `device` or `batched`."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def _precision(self) -> AbstractContextManager[object]:
        if self.training.precision != "bf16":
            return nullcontext()
        if self.batched and self.device.type == "cpu":
            return _bf16_in_lanes_on_cpu()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=not self.batched)


@contextmanager
def _bf16_in_lanes_on_cpu() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Float32Norms():
        yield


@functools.lru_cache(maxsize=1)  # `init` is called per client, one cohort after another
def _init_shared(architecture: Architecture, frozen: tuple[str, ...], seed: int) -> Tree:
    return remove_paths(architecture.init(stream(seed, 0, SERVER, "init")), frozen)


@functools.lru_cache(maxsize=64)
def _template(architecture: Architecture, frozen: tuple[str, ...]) -> Tree:
    return remove_paths(tree.like(architecture.init(stream(0, 0, SERVER, "template"))), frozen)

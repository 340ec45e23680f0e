"""FedCP: a gate splits the features of every sample between a personal head and the global one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.algorithms.base import only
from pflmpi.algorithms.conditional import gate, init_gate
from pflmpi.algorithms.shared_parts import WeightedSharedParts
from pflmpi.learning.client import Batch, ClientData, cross_entropy, uniform
from pflmpi.learning.personal import Kept, Merge, NotAModel, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.rng import stream
from pflmpi.tree import Tree, leaf, part

BANDWIDTHS = (10, 15, 20, 50)


@dataclass(frozen=True, kw_only=True)
class FedCP(WeightedSharedParts):
    """Zhang et al., FedCP: Separating Feature Information via Conditional Policy, KDD 2023.

    The gate r in 0..1 (see `conditional.gate`, the conditional policy network) sees the features z = f_i(x) times the
    client's context v_i, the sum of the rows of its head h_i divided by its length. With the global body f_g and head
    h_g as received, both fixed, a client steps f_i, h_i and the gate together along the gradient of

        CE(h_i(r * z) + h_g((1 - r) * z), y) + lambda MMD(z, f_g(x)),

    MMD being the mean over pairs of samples of k(z, z') + k(u, u') - 2 k(z, u'), u = f_g(x), with the kernel
    k(a, b) = sum_w exp(-||a - b||^2 / (2 w)) over the bandwidths w = 10, 15, 20, 50. Server: means weighted by samples.

    Up: f_i, (h_i + h_g) / 2 and the gate (mean). Down: f_g, h_g and the gate (shared). Persists: server: f_g, h_g, the
    gate; client: h_i, and its batch-norm statistics with `training.bn: local`. Evaluated: h_i(r * z) + h_g((1 - r) * z)
    with the fresh body, global head and gate.

    Readings. The gate has Gumbel noise in training only; the authors' code has it in tests too, so that their accuracy
    is random. v_i is that of h_i at the start of the round, also in the first one, where the authors use random
    numbers. A participant receives all three parts; the authors send the body to every client and the rest to
    participants. Batch norm in f_g uses the batch's statistics, and dropout the masks of f_i, so that z and u are equal
    before the first step. lambda = 5 is the authors' value for a learning rate of 0.005; a much larger rate needs a
    smaller lambda, or the features cannot leave those of f_g.

    Newcomers: h_i begins as the global head h_g and is trained as a participant's; ours, the paper has no clients that
    join later.
    """

    summary: ClassVar[str] = "a gate per sample between a personal and a global head"
    paper: ClassVar[str] = "Zhang et al., KDD 2023"
    search: ClassVar = {"alignment_weight": (0.01, 10.0, "log")}
    linear_head: ClassVar[bool] = True
    predicts_with: ClassVar[tuple[str, ...]] = ("model",)
    shared: ClassVar[tuple[str, ...]] = ("body", "head", "gate")
    draws_noise: ClassVar[bool] = True

    alignment_weight: Annotated[
        float, Field(ge=0, description="how strongly personal features are drawn to global ones (lambda)")
    ] = 5.0

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss compares all pairs of samples."""
        return self.alignment_weight > 0

    def init_model(self, task: Task) -> Tree:
        return {**task.init(), "gate": init_gate(stream(task.seed, 0, -1, "gate"), task.num_features)}

    def like_model(self, task: Task) -> Tree:
        return {**task.like(), "gate": tree.like(init_gate(stream(0, 0, -1, "template"), task.num_features))}

    def to_keep(self, task: Task, model: Tree) -> Tree:
        return only(model, ("head", *task.local_stats))

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        shared, own = part(down["model"], "head"), part(client, "head")
        start: Tree = {**down["model"], **client}

        def loss(model: Tree, batch: Batch) -> Tensor:
            received = part(model, "received")
            z = task.features(model, batch.x, training=True)
            assert batch.key is not None
            noise = uniform(batch.key, (len(z), task.num_features))
            share = gate(part(model, "gate"), z * leaf(model, "context"), noise)
            scores = task.logits(part(model, "head"), share * z) + task.logits(part(received, "head"), (1 - share) * z)
            # With a copy of the statistics, which a forward pass in training changes.
            shared_model = {**received, **tree.clone(only(received, ("stats",))), **only(model, ("noise",))}
            global_z = task.features(shared_model, batch.x, training=True)
            return cross_entropy(scores, batch) + self.alignment_weight * discrepancy(z, global_z, batch)

        fixed: Tree = {"received": {**down["model"], **only(client, ("stats",))}, "context": context(own)}
        model = train(task, start, data.passes["train"], loss, data.learning_rate, fixed=fixed)
        head = tree.map(lambda entry, shared_entry: (entry + shared_entry) / 2, part(model, "head"), shared)
        return self.to_keep(task, model), {"model": self.to_share(task, {**model, "head": head})}

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {**client, "head": down["model"]["head"]}

    def personal(self, task: Task) -> Personal:
        return NotAModel("two heads and a gate between them", Merge((Received("model"), Kept())))

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model, own = down["model"], part(client, "head")
        z = task.features({**model, **client}, x)
        share = gate(part(model, "gate"), z * context(own))
        return task.logits(own, share * z) + task.logits(part(model, "head"), (1 - share) * z)


def context(head: Tree) -> Tensor:
    """The context of a client, [d]: the sum of its head's rows, normalised."""
    return F.normalize(leaf(head, "weight").sum(0), dim=0)


def discrepancy(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """The maximum mean discrepancy of features a: [B, d] and b: [B, d] of the real samples of a batch."""
    share = torch.full_like(a[:, 0], 1 / len(a)) if batch.padding is None else batch.padding.share
    pairs = _kernel(a, a) + _kernel(b, b) - 2 * _kernel(a, b)
    return share @ pairs @ share


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    """The sum of Gaussian kernels between all rows, [B, B]."""
    distances = a.square().sum(-1, keepdim=True) + b.square().sum(-1) - 2 * a @ b.mT
    distances = distances.clamp(min=0)  # of equal rows that are large, rounding leaves any number
    return torch.stack([torch.exp(-distances / (2 * bandwidth)) for bandwidth in BANDWIDTHS]).sum(0)

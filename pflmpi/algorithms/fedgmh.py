"""FedGMH: the server keeps one whole head per label; clients mix theirs in at critical entries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round
from pflmpi.learning.client import Batch, ClientData, Loss, average, class_means, model_loss
from pflmpi.learning.diagnostics import Diagnostic, EntryShare
from pflmpi.learning.personal import Kept, NotAModel, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import ClassMeans, Downlink, Messages, OwnClasses, Shared, Uplink
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FedGMH(Algorithm):
    """Sun and Ni, FedGMH: Label Interference Elimination via Global Multi-Head, 2026.

    Client: mixes the received heads into its own at its critical entries psi (eq. 9), with weights n_ms / n_m,

        h_m <- h_m * (1 - psi_m) + (sum_s n_ms / n_m h_s) * psi_m,

    trains body and head, marks as critical the floor(beta L) entries of the head with the largest
    |(theta^E - theta^0) theta^E| (eqs. 7, 8; ties by lower index, weight before bias) and uploads class means (eq. 5).
    Server (eq. 6): h_s takes SGD steps of cross-entropy on the uploaded means of label s alone.

    Up: label and mean of each class held, |S| (4 d + 4) bytes. Down: the heads of the classes held, 4 |S| L bytes.
    Persists: client: model and psi; server: K heads. Evaluated: the client's model after its local training, or
    (`evaluated: mixed`, with which a client keeps its class shares) that with the reply's heads mixed in by eq. 9.

    Ablations (section 3.5): `variant: onehead` keeps one global head, mixed at critical entries (GMH-o);
    `avghead` averages own and mixed head, eq. 10 (GMH-a); `oneavg` averages own and the one global head,
    eq. 11 (GMH-oa).

    Readings. Before a client's first training psi is all false. One server epoch per round (`server_epochs`), in client
    order, with a step for every uploaded mean, as in eq. 6; `server_batch_size: null` takes minibatches of the clients'
    batch size, mostly one step per round. Heads without uploads do not change. The paper does not say which model is
    tested. A public repository with the paper's settings (youcaihua1/FedGMH) reverses eq. 9, so that critical entries
    stay the client's own and the others are replaced by the global heads' (`critical_from: own`); uses
    |(theta^E - theta^0)^2 theta^E| in eq. 8 (`importance: squared_change`) and the floor(beta L) largest of weight and
    bias each (`ranked: tensor`); and tests only in the last 20 rounds, after mixing (`evaluated: mixed`, and
    `figure: best20` in a table).

    Label turnover (section 2.3.5), by `label_turnover: T`, is our schedule: for T rounds a client lacks its first
    label, for T rounds its second and so on, then for T rounds it has all; an only label stays. It trains on the labels
    that it has and mixes their heads; for the missing one it sends zeros and a count of 0 (counts are 4 |S| bytes).

    Newcomers: ours. They train as in a first round, from the initial weights, with psi all false in the first update;
    the global heads matter from the second on (`evaluation.unseen_updates`), and at once with `avghead`, `oneavg` and
    `critical_from: own`.
    """

    summary: ClassVar[str] = "one global head per label, mixed in at critical entries"
    paper: ClassVar[str] = "Sun and Ni, 2026"
    search: ClassVar = {"critical_share": (0.0, 1.0), "head_lr": (0.001, 1.0, "log")}
    needs: ClassVar = {
        key: ("variant", "full", "onehead") for key in ("critical_share", "critical_from", "importance", "ranked")
    }
    linear_head: ClassVar[bool] = True
    unlike_models: ClassVar[bool] = True

    critical_share: Annotated[
        float, Field(ge=0, le=1, description="share of the head's entries that are critical (beta); see critical_from")
    ] = 0.5
    head_lr: Annotated[float, Field(ge=0, description="learning rate of the heads on the server (eta_h)")] = 1.0
    server_epochs: Annotated[int, Field(ge=1, description="passes of the server over the class means in a round")] = 1
    server_batch_size: Annotated[
        int | None, Field(ge=1, description="class means in a step of a head; null: as many as the clients' batch size")
    ] = 1
    variant: Annotated[
        Literal["full", "onehead", "avghead", "oneavg"],
        Field(description="full, or an ablation: onehead (GMH-o), avghead (GMH-a), oneavg (GMH-oa)"),
    ] = "full"
    critical_from: Annotated[
        Literal["global", "own"],
        Field(description="global heads' entries where critical and own ones elsewhere (eq. 9), or the reverse"),
    ] = "global"
    importance: Annotated[
        Literal["change", "squared_change"],
        Field(description="an entry's importance: its change, or that squared, times it"),
    ] = "change"
    ranked: Annotated[
        Literal["head", "tensor"], Field(description="the share is of the whole head, or of weight and bias each")
    ] = "head"
    label_turnover: Annotated[
        int | None,
        Field(ge=1, description="rounds for which a client is without a label, one after another; null: none"),
    ] = None
    evaluated: Annotated[
        Literal["trained", "mixed"],
        Field(description="the model after local training, or that with the new global heads mixed in"),
    ] = "trained"

    def __post_init__(self) -> None:
        if self.evaluated == "mixed":
            object.__setattr__(self, "predicts_with", ("heads",))

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss is a mean over those samples of the batch whose label is present."""
        return self.label_turnover is not None

    @property
    def one_head(self) -> bool:
        """Whether the server keeps a single global head."""
        return self.variant in ("onehead", "oneavg")

    @property
    def averages(self) -> bool:
        """Whether own and global head are averaged instead of mixed at critical entries."""
        return self.variant in ("avghead", "oneavg")

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"means": ClassMeans(task.num_features, counts=self.label_turnover is not None)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        head = part(task.like("head"), "head")
        return {"heads": Shared(head) if self.one_head else OwnClasses(head)}

    def init_server(self, task: Task) -> Tree:
        head = part(task.init(), "head")
        heads = 1 if self.one_head else task.num_classes
        return {"heads": tree.map(lambda entry: entry.expand(heads, *entry.shape).clone(), head)}

    def init_client(self, task: Task) -> Tree:
        model = task.init()
        state: Tree = {"model": model}
        if not self.averages:
            state["critical"] = tree.map(lambda entry: torch.zeros_like(entry, dtype=torch.bool), part(model, "head"))
        if self.evaluated == "mixed":
            state["shares"] = torch.zeros(task.num_classes)
        return state

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        heads = part(server, "heads")
        return {"heads": tree.map(lambda entry: entry[0], heads) if self.one_head else heads}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model, mixed = part(client, "model"), self.evaluated == "mixed"
        present = self.present(data)
        counts = data.class_counts if present is None else data.class_counts * present
        shares = counts / counts.sum() if mixed or not self.one_head else None
        start = self.mix(part(model, "head"), self.combine(down["heads"], shares), client)
        fixed: Tree = {} if present is None else {"present": present.float()}
        loss = model_loss(task) if present is None else present_loss(task)
        model = train(task, {**model, "head": start}, data.passes["train"], loss, data.learning_rate, fixed=fixed)
        state: Tree = {"model": model}
        if not self.averages:
            state["critical"] = self.critical_entries(start, part(model, "head"))
        if mixed and shares is not None:
            state["shares"] = shares
        means = class_means(task, model, data)
        if present is not None:
            means = {"means": leaf(means, "means") * present.unsqueeze(-1), "counts": leaf(means, "counts") * present}
        return state, {"means": means}

    def present(self, data: ClientData) -> Tensor | None:
        """The labels that the client has in this round, [K] bool; None without label turnover."""
        if self.label_turnover is None:
            return None
        index, num_labels = data.holds.cumsum(0) - 1, data.holds.sum()  # the index of each label among the client's
        absent = (data.round - 1) // self.label_turnover % (num_labels + 1)
        return data.holds & ((index != absent) | (num_labels == 1))

    def critical_entries(self, before: Tree, after: Tree) -> Tree:
        """Which entries of a head are critical (bool, shaped as the head): the floor(beta L) most important.

        Importance is |(after - before) after| (eqs. 7, 8); ties go to the lower index, weight before bias.
        """
        names = ("weight", "bias")
        changes = [leaf(after, name) - leaf(before, name) for name in names]
        if self.importance == "squared_change":
            changes = [change.square() for change in changes]
        importance = [(change * leaf(after, name)).abs() for name, change in zip(names, changes, strict=True)]
        if self.ranked == "tensor":
            weight, bias = (_mark_largest(values.flatten(), self.critical_share) for values in importance)
        else:
            mask = _mark_largest(torch.cat([values.flatten() for values in importance]), self.critical_share)
            weight, bias = torch.split(mask, [values.numel() for values in importance])
        return {"weight": weight.view_as(importance[0]), "bias": bias}

    def combine(self, heads: Tree, shares: Tensor | None) -> Tree:
        """One head made of those received: sum_s n_ms / n_m h_s."""
        if self.one_head or shares is None:
            return heads
        return tree.map(lambda entry: torch.tensordot(shares, entry, dims=([0], [0])), heads)

    def mix(self, own: Tree, received: Tree, client: Tree) -> Tree:
        """The personal head from which local training starts (eqs. 9 to 11)."""
        if self.averages:
            return tree.map(lambda entry, shared_entry: (entry + shared_entry) / 2, own, received)
        critical, uncritical = (received, own) if self.critical_from == "global" else (own, received)
        return tree.map(torch.where, part(client, "critical"), critical, uncritical)

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        labels, means = leaf(up["means"], "labels").long(), leaf(up["means"], "means")
        if self.label_turnover is not None:
            present = leaf(up["means"], "counts") > 0
            labels, means = labels[present], means[present]
        weight, bias = leaf(part(server, "heads"), "weight"), leaf(part(server, "heads"), "bias")
        for _ in range(self.server_epochs):
            for member in _minibatches(labels, len(weight), self.server_batch_size or task.training.batch_size):
                in_step = member.any(0)  # a step uses few of many uploads
                weight, bias = self._step(weight, bias, means[in_step], labels[in_step], member[:, in_step])
        return {"heads": {"weight": weight, "bias": bias}}

    def _step(
        self, weight: Tensor, bias: Tensor, means: Tensor, labels: Tensor, member: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All heads after one SGD step, each on its own uploads.

        Args:
            weight: [H, K, d]; H is K, or 1 with one global head.
            bias: [H, K].
            means: [M, d].
            labels: [M].
            member: [H, M] bool, the uploads from which head h learns in this step.
        """
        scores = torch.einsum("md,hkd->hmk", means, weight) + bias.unsqueeze(1)
        error = scores.softmax(-1) - F.one_hot(labels, weight.shape[1]).to(scores.dtype)
        share = member / member.sum(1, keepdim=True).clamp(min=1)  # the gradient of the mean cross-entropy
        error = error * share.unsqueeze(-1)
        return (
            weight - self.head_lr * torch.einsum("hmk,md->hkd", error, means),
            bias - self.head_lr * error.sum(1),
        )

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        if self.averages:
            return {}
        return {
            "critical": EntryShare(
                title="Critical entries ψ",
                caption="The entries of the head that training has changed most, weighed by their size (eqs. 7, 8).",
                kept="critical",
            )
        }

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model = part(client, "model")
        if self.evaluated == "mixed":
            shares, own = leaf(client, "shares"), part(model, "head")
            mixed = self.mix(own, self.combine(down["heads"], shares), client)
            trained = shares.sum() > 0
            model = {**model, "head": tree.map(lambda new, old: torch.where(trained, new, old), mixed, own)}
        return task.predict(model, x)

    def personal(self, task: Task) -> Personal:
        if self.evaluated == "mixed":
            return NotAModel("its model with the new global heads mixed into its head", nearest=Kept("model"))
        return Kept("model")


def present_loss(task: Task) -> Loss:
    """The mean cross-entropy over the batch's samples with present labels, `params["present"]` [K]; 0 without any."""

    def loss(params: Tree, batch: Batch) -> Tensor:
        scores, present = task.predict(params, batch.x, training=True), leaf(params, "present")[batch.y]
        values = F.cross_entropy(scores, batch.y, reduction="none", label_smoothing=batch.smoothing)
        share = average(present, batch)
        return average(values * present, batch) / torch.where(share > 0, share, 1.0)

    return loss


def _minibatches(labels: Tensor, num_heads: int, batch_size: int) -> Iterator[Tensor]:
    """One [H, M] mask per server step: each head's uploads, in client order, `batch_size` at a time."""
    own_label = labels == torch.arange(num_heads).unsqueeze(-1)
    member = torch.ones_like(own_label) if num_heads == 1 else own_label
    step_of_upload = (member.cumsum(1) - 1) // batch_size
    num_steps = -(-int(member.sum(1).max()) // batch_size)
    return (member & (step_of_upload == step) for step in range(num_steps))


def _mark_largest(values: Tensor, share: float) -> Tensor:
    """Mask of the floor(share L) largest of the values [L], bool [L]; ties go to the lower index."""
    order = values.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return rank < int(share * len(values) + 1e-9)

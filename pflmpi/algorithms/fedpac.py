"""FedPAC: features aligned to global class means, and heads combined for each client."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, Round, only
from pflmpi.learning.client import Batch, ClientData, average, class_means, cross_entropy, on_features
from pflmpi.learning.personal import Kept, Merge, Personal, Received
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import ClassMeans, Downlink, Mean, Messages, Own, OwnClasses, Rows, Shared, Uplink, tensor
from pflmpi.tree import Tree, leaf, part

_MIN_WEIGHT = 1e-3  # of a head in a combination; smaller ones are dropped, as in the authors' code
_MIN_VARIANCE = 1e-9  # relative to the largest squared distance; else equal clients without variance have no solution


@dataclass(frozen=True, kw_only=True)
class FedPAC(Algorithm):
    """Xu, Tong and Huang, Personalized FL with Feature Alignment and Classifier Collaboration, ICLR 2023.

    Algorithm 1. A client first measures the features of its data under the received body: class means mu_k and the
    variance V_i / n_i = (E|f|^2 - sum_k |p_k mu_k|^2) / n_i. It trains its head for an epoch with the body fixed, then
    the body with the head fixed by cross-entropy plus `alignment_weight` (lambda) times the mean over samples and
    entries of (f(x) - c_y)^2 (feature alignment), with the global class means c. The server averages the bodies by
    samples and the class means by their counts, and gives each participant the combination of heads with the weights
    that solve equation 11, the quadratic program min_a sum_j a_j^2 V_j / n_j + sum_k |sum_j a_j (h_ik - h_jk)|^2,
    a >= 0, sum a = 1 with h_jk = p_jk mu_jk.

    Up: the body (mean), the head (each), class means under the received and the trained body, the variance (each).
    Down: the body (shared), the combined head (own), class means (of the classes held). Persists: server: the body, the
    heads of all clients, class means. Evaluated: the fresh body with the client's combined head.

    Readings. A class without a global mean is aligned to the client's own mean under the received body; in the first
    round, when there is none at all, nothing is aligned. Weights below 0.001 are dropped, unless all of them are,
    and the others scaled to 1. Variances are at least 1e-9 of the largest distance, so that the program has one
    solution. The authors' code prints the accuracy of that model and the one after local training; here it is the
    former, as with FedPer and FedRep.
    `combine_heads: false` is the ablation of their code (`agg_g`).

    Newcomers: cannot join, since a head is combined for those who take part, from what they measure; under the mean of
    all heads they predict no better than at random.
    """

    summary: ClassVar[str] = "features near global class means, heads combined for each"
    paper: ClassVar[str] = "Xu et al., ICLR 2023"
    search: ClassVar = {"alignment_weight": (0.01, 10.0, "log"), "head_lr": (0.001, 1.0, "log")}
    predicts_with: ClassVar[tuple[str, ...]] = ("body", "head")

    alignment_weight: Annotated[float, Field(ge=0, description="lambda, weight of the alignment")] = 1.0
    head_epochs: Annotated[int, Field(ge=0, description="epochs in which the head alone is trained")] = 1
    head_lr: Annotated[float, Field(gt=0, description="learning rate of the head, times the decay")] = 0.1
    combine_heads: Annotated[bool, Field(description="combine heads; otherwise each client gets its own back")] = True

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        return {"head": Pass(epochs=self.head_epochs), "body": Pass()}

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        d = task.num_features
        return {
            "body": Mean(task.like("body", *task.shared_stats)),
            "head": Rows(part(task.like("head"), "head")),
            "before": ClassMeans(d),
            "after": ClassMeans(d),
            "variance": Rows({"value": tensor()}),
        }

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        return {
            "body": Shared(task.like("body", *task.shared_stats)),
            "head": Own(part(task.like("head"), "head")),
            "means": OwnClasses({"mean": tensor(task.num_features), "known": tensor()}),
        }

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        return {"head": task.like("head"), "body": task.like("body")}

    def init_server(self, task: Task) -> Tree:
        model, n = task.init(), task.num_clients
        means: Tree = {"mean": torch.zeros(task.num_classes, task.num_features), "known": torch.zeros(task.num_classes)}
        heads = tree.map(lambda entry: entry.expand(n, *entry.shape).clone(), part(model, "head"))
        return {"body": only(model, ("body", *task.shared_stats)), "heads": heads, "means": means}

    def init_client(self, task: Task) -> Tree:
        return only(task.init(), task.local_stats)

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        rows = torch.from_numpy(receivers)
        heads = tree.map(lambda heads: heads[rows], part(server, "heads"))
        return {"body": part(server, "body"), "head": heads, "means": part(server, "means")}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model: Tree = {**client, **down["body"], "head": down["head"]}
        fixed_body, samples = on_features(task, model, data, "head")
        before = class_means(fixed_body, model, samples)
        variance = self._feature_variance(fixed_body, model, before, samples)
        known = leaf(down["means"], "known").unsqueeze(-1)
        fixed: Tree = {
            "anchors": torch.where(known > 0, leaf(down["means"], "mean"), leaf(before, "means")),
            "weight": self.alignment_weight * known.max(),
        }

        def head_loss(model: Tree, batch: Batch) -> Tensor:
            return cross_entropy(fixed_body.predict(model, batch.x), batch)

        def body_loss(model: Tree, batch: Batch) -> Tensor:
            anchors, weight = leaf(model, "anchors"), leaf(model, "weight")
            z = task.features(model, batch.x, training=True)
            distance = (z - anchors[batch.y]).square().mean(-1)
            return cross_entropy(task.logits(part(model, "head"), z), batch) + weight * average(distance, batch)

        head_lr = self.head_lr * data.decay
        model = train(fixed_body, model, samples.passes["head"], head_loss, head_lr, frozen=("body",), name="head")
        model = train(
            task, model, data.passes["body"], body_loss, data.learning_rate, frozen=("head",), name="body", fixed=fixed
        )
        return only(model, task.local_stats), {
            "body": only(model, tuple(down["body"])),
            "head": part(model, "head"),
            "before": before,
            "after": class_means(task, model, data),
            "variance": {"value": variance},
        }

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        rows = torch.from_numpy(round.participants)
        weights = torch.eye(len(rows), dtype=torch.float64)
        if self.combine_heads:
            weights = torch.from_numpy(self.combination(task, up, round.participants))
        combined = tree.map(lambda heads: (weights @ heads.flatten(1).double()).view_as(heads).float(), up["head"])
        heads = tree.map(lambda old, new: old.index_copy(0, rows, new), part(server, "heads"), combined)
        return {"body": up["body"], "heads": heads, "means": self._global_means(part(server, "means"), up["after"])}

    def personal(self, task: Task) -> Personal:
        return Merge((Kept(), Received("body"), Received("head", at="head")))

    def combination(self, task: Task, up: Messages, participants: np.ndarray) -> np.ndarray:
        """[P, P] float64: in each row the weights of the participants' heads for one of them (equation 11)."""
        before, count = up["before"], len(participants)
        h = torch.zeros(count, task.num_classes, task.num_features, dtype=torch.float64)
        rows = torch.from_numpy(np.searchsorted(participants, leaf(before, "clients").numpy()))
        counts = leaf(before, "counts").double()
        totals = torch.zeros(count, dtype=torch.float64).index_add(0, rows, counts)
        h[rows, leaf(before, "labels").long()] = leaf(before, "means").double() * (counts / totals[rows]).unsqueeze(-1)
        variance = leaf(up["variance"], "value").double().clamp(min=1e-12).numpy()
        weights = np.empty((count, count))
        for i in range(count):
            differences = (h[i] - h).flatten(1)
            products = (differences @ differences.T).numpy()
            weights[i] = _minimize(np.diag(np.maximum(variance, _MIN_VARIANCE * products.max())) + products)
        return weights

    def _feature_variance(self, task: Task, model: Tree, means: Tree, data: ClientData) -> Tensor:
        """V / n of a client's features."""
        total = torch.zeros_like(data.class_counts[0], dtype=torch.float64)
        with torch.no_grad():
            for batch in data.train:
                squares = task.features(model, batch.x).double().square().sum(-1)
                total = total + (squares if batch.padding is None else squares * batch.padding.weight).sum()
        n = data.num_samples.double()
        weighted = leaf(means, "means").double() * (data.class_counts.double() / n).unsqueeze(-1)
        return ((total / n - weighted.square().sum()) / n).float()

    def _global_means(self, old: Tree, up: Tree) -> Tree:
        """The class means of the participants, averaged by their counts; other classes keep theirs."""
        mean, labels, counts = leaf(old, "mean"), leaf(up, "labels").long(), leaf(up, "counts").double()
        sums = torch.zeros_like(mean, dtype=torch.float64)
        sums = sums.index_add(0, labels, leaf(up, "means").double() * counts.unsqueeze(-1))
        totals = torch.zeros(len(mean), dtype=torch.float64).index_add(0, labels, counts)
        averages = (sums / totals.clamp(min=1).unsqueeze(-1)).float()
        uploaded = totals > 0
        return {
            "mean": torch.where(uploaded.unsqueeze(-1), averages, mean),
            "known": torch.maximum(leaf(old, "known"), uploaded.float()),
        }


def _minimize(matrix: np.ndarray) -> np.ndarray:
    """The a >= 0 with sum 1 that minimises a' matrix a, for a positive definite matrix [P, P].

    Without the constraint on the sum it is, up to a factor, the solution of min a' matrix a / 2 - sum a, which is a
    non-negative least-squares problem.
    """
    optimize: Any = import_module("scipy.optimize")  # here, since few runs need it
    root = np.linalg.cholesky(matrix).T
    weights, _ = optimize.nnls(root, np.linalg.solve(root.T, np.ones(len(matrix))))
    weights /= weights.sum()
    large = weights >= _MIN_WEIGHT
    weights = np.where(large, weights, 0) if large.any() else weights
    return np.asarray(weights / weights.sum())

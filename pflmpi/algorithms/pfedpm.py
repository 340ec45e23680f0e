"""pFedPM: personal models regularised to a mix of own and global class means, with an optional relation module."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round, only
from pflmpi.algorithms.prototypes import Weighting, batch_means, combine_class_means, initial_class_means, one_hot
from pflmpi.learning.client import Batch, ClientData, average, class_means, cross_entropy
from pflmpi.learning.diagnostics import ClassVectors, Diagnostic, PerClient
from pflmpi.learning.optimizers import Rate
from pflmpi.learning.personal import Kept, NotAModel, Personal
from pflmpi.learning.sgd import Phase, alternate, gradient
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import ClassMeans, Downlink, Messages, OwnClasses, Shared, Uplink, tensor, with_rows
from pflmpi.models.layers import linear, uniform
from pflmpi.rng import stream
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class PFedPM(Algorithm):
    """Xing et al., Personalized Federated Learning Based on Feature Fusion, 2024.

    Mixed means (eq. 8), fixed during a round: M_ij = a c_ij + (1 - a) C_j from the client's own means c_ij of its last
    round and the global ones C_j; M_ij = C_j for a class without an own mean. On every minibatch the model takes a step
    of (eqs. 9 to 11)

        CE + lambda * sum_j (b_j / b) ||M_ij - m_j||_2

    with m_j the mean feature of the b_j samples of class j among the b of the batch. With `relation` (R-pFedPM) the
    relation module g then takes a step of the mean over samples of sum_j (g([f(x_s); M_ij]) - 1[y_s = j])^2, with the
    body fixed (eqs. 12, 13; algorithm 1). Server (eq. 7): see `prototypes.combine_class_means`.
    Prediction: the decision module (the head), or with `relation` the class of the highest relation score.

    Up: label, count and mean of each class held. Down: C_j, with a flag whether there is one, of the classes held; with
    `relation` of all (shared). Persists: client: its model (batch-norm statistics too) and own means, with `relation`
    also g and the mixed means; server: all C_j. Evaluated: the client's model after its training, `relation` with the
    mixed means that its last round used.

    Readings. Eq. 7 divides weights that sum to one once more by the number of clients; `class_mean_weighting:
    as_printed` does too, the default does not. Eq. 10 weighs a class by |D_ij| / N_j, the client's share of all samples
    of the class, which no message tells a client; b_j / b, the class's share of the batch, is in its place. Eq. 11
    prints a norm, not its square; `distance: mse` is (1/d) ||.||^2. Where one client alone has a class, in one batch,
    m_j is M_ij but for rounding, and the gradient of the norm, a unit vector, is noise; with `norm_epsilon` e, that of
    sqrt(||.||^2 + e), it vanishes there.
    A class without a global mean, such as all in round 1, adds nothing to either loss and is never predicted by g;
    until the classes that a client holds all had one in its last round, its head predicts. The step of g sees features
    in evaluation mode, as prediction does. Eq. 12 prints a sum over samples too: that is a matter of g's learning rate,
    which the paper does not give; it is the model's unless `relation_lr` is given. The mean over classes, a K-th of
    that, is too slow: 28 % instead of 98 % after 30 rounds (MNIST, the paper's model and optimiser, 8 clients).
    With `bounds` every client keeps what corollary 1 asks, estimated in each round (eqs. 22, 21 before the first step):

        lambda < ||g||^2 / (L_2 E G),   eta < 2 (||g||^2 - lambda L_2 E G) / (L_2 E G)

    with g the mean and G the mean norm of the gradients of the round's E minibatches at its first model, and for L_2
    the largest ||change of a class mean|| / ||change of the body||, which the true constant may exceed. They are known
    from a client's second round on, and negative where nothing is promised.

    Newcomers: a model from the initial weights, trained towards the global means of their classes; ours, the paper has
    a fixed set of clients.
    The paper has a = 0.3, 0.4, 0.6 for 3, 4, 5 classes per client; lambda = 1 for MNIST and FEMNIST, 0.1 for CIFAR-10.
    """

    summary: ClassVar[str] = "personal models near mixed own and global class means"
    paper: ClassVar[str] = "Xing et al., 2024"
    search: ClassVar = {"own_weight": (0.0, 1.0), "prototype_weight": (0.01, 10.0, "log")}
    needs: ClassVar = {"relation_lr": ("relation", True), "norm_epsilon": ("distance", "l2")}
    unlike_models: ClassVar[bool] = True

    own_weight: Annotated[
        float, Field(ge=0, le=1, description="share of the own class mean beside the global one (a)")
    ] = 0.3
    prototype_weight: Annotated[float, Field(ge=0, description="pull to class means (lambda)")] = 1.0
    distance: Annotated[Literal["l2", "mse"], Field(description="Euclidean, or the mean of squares")] = "l2"
    norm_epsilon: Annotated[float, Field(ge=0, description="added under the root of the l2 distance")] = 0.0
    class_mean_weighting: Annotated[Weighting, Field(description="how class means are weighted")] = "samples"
    relation: Annotated[bool, Field(description="predict with a learned relation instead of distances")] = False
    relation_lr: Annotated[float | None, Field(gt=0, description="null: the model's")] = None
    bounds: Annotated[bool, Field(description="estimate the bounds on lambda and eta that ensure convergence")] = False

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss has class means of the batch."""
        return self.prototype_weight > 0

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        return {"means": ClassMeans(task.num_features)}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        one_class: Tree = {"means": tensor(task.num_features), "known": tensor(dtype=torch.bool)}
        shared = Shared(with_rows(one_class, task.num_classes))
        return {"class_means": shared if self.relation else OwnClasses(one_class)}

    def init_server(self, task: Task) -> Tree:
        return initial_class_means(task)

    def init_client(self, task: Task) -> Tree:
        state: Tree = {"model": task.init(), "own": initial_class_means(task)}
        if self.relation:
            state["relation"] = init_relation(stream(task.seed, 0, task.client, "relation"), task.num_features)
            state["mixed"] = initial_class_means(task)
        if self.bounds:
            state["bounds"] = {"weight": torch.zeros(()), "rate": torch.zeros(()), "known": torch.tensor(False)}
        return state

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"class_means": server}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        mixed, known = self.mix(part(client, "own"), down["class_means"]), leaf(down["class_means"], "known")

        def fit(params: Tree, batch: Batch) -> Tensor:
            z = task.features(params, batch.x, training=True)
            drift = self.drift(z, batch, leaf(params, "mixed"), leaf(params, "known"))
            return cross_entropy(task.logits(part(params, "head"), z), batch) + self.prototype_weight * drift

        def relate(params: Tree, batch: Batch) -> Tensor:
            mixed, known = leaf(params, "mixed"), leaf(params, "known")
            scores = relation_scores(part(params, "relation"), task.features(params, batch.x), mixed)
            error = (scores - one_hot(batch, len(known))).square() * known
            return average(error.sum(-1), batch)

        phases = [Phase(fit, TRAINED_PARTS, data.learning_rate)]
        if self.relation:
            phases.append(Phase(relate, ("relation",), self.learning_rate(task, data), name="relation"))
        params = {**part(client, "model"), **only(client, ("relation",))}
        fixed: Tree = {"mixed": mixed, "known": known}
        params = alternate(task, params, data.passes["train"], phases, fixed=fixed)
        model = only(params, ("body", "head", "stats"))
        up = class_means(task, model, data)
        state: Tree = {"model": model, "own": {"means": up["means"], "known": data.holds}}
        if self.relation:
            state |= {"relation": params["relation"], "mixed": {"means": mixed, "known": known}}
        if self.bounds:
            grads = (
                gradient(task, tree.clone({**part(client, "model"), **fixed}), fit, batch, TRAINED_PARTS)[0]
                for batch in data.passes["train"]
            )
            state["bounds"] = self.estimate_bounds(grads, data.passes["train"], client, state)
        return state, {"means": up}

    def estimate_bounds(self, grads: Iterable[Tree], batches: Iterable[Batch], before: Tree, after: Tree) -> Tree:
        """The bounds of a round from the gradients at its first model, and the client's state before and after it."""
        total, norm_sum = tree.map(torch.zeros_like, only(part(before, "model"), TRAINED_PARTS)), torch.zeros(())
        for grad in grads:
            total, norm_sum = tree.map(torch.add, total, grad), norm_sum + _squared_norm(grad).sqrt()
        steps = sum(torch.as_tensor(batch.active) for batch in batches)
        squared_mean = _squared_norm(total) / steps**2
        known = leaf(part(before, "own"), "known") & leaf(part(after, "own"), "known")
        changes = leaf(part(after, "own"), "means") - leaf(part(before, "own"), "means")
        largest_change = torch.where(known, torch.linalg.vector_norm(changes, dim=-1), 0.0).max()
        bodies = part(part(after, "model"), "body"), part(part(before, "model"), "body")
        lipschitz = largest_change / _squared_norm(tree.map(torch.sub, *bodies)).sqrt()
        weight = squared_mean / (lipschitz * norm_sum)  # E G is the sum of the norms
        usable = known.any() & weight.isfinite()
        rate = 2 * (weight - self.prototype_weight)
        return {"weight": torch.where(usable, weight, 0.0), "rate": torch.where(usable, rate, 0.0), "known": usable}

    def trainings(self, task: Task) -> Mapping[str, Tree]:
        trainings = super().trainings(task)
        if not self.relation:
            return trainings
        template = tree.like(init_relation(stream(0, 0, -1, "template"), task.num_features))
        return {**trainings, "relation": {"relation": template}}

    def learning_rate(self, task: Task, data: ClientData) -> Rate:
        """The learning rate of the relation module in a round."""
        return (self.relation_lr or task.training.lr) * data.decay

    def mix(self, own: Tree, received: Tree) -> Tensor:
        """The mixed means [K, d] (eq. 8)."""
        shared = leaf(received, "means")
        mixed = self.own_weight * leaf(own, "means") + (1 - self.own_weight) * shared
        return torch.where(leaf(own, "known").unsqueeze(-1), mixed, shared)

    def drift(self, z: Tensor, batch: Batch, mixed: Tensor, known: Tensor) -> Tensor:
        """The second term of the loss (eqs. 9, 11), a scalar.

        Args:
            z: [B, d] features of the batch.
            mixed: [K, d].
            known: [K] bool, the classes that have a mixed mean.
        """
        share, means = batch_means(z, batch, len(known))
        if self.distance == "mse":
            distance = (mixed - means).square().mean(-1)
        elif self.norm_epsilon:
            distance = ((mixed - means).square().sum(-1) + self.norm_epsilon).sqrt()
        else:
            distance = torch.linalg.vector_norm(mixed - means, dim=-1)  # its gradient at zero is defined as zero
        return (share * known * distance).sum()

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return combine_class_means(up["means"], server, self.class_mean_weighting)

    def personal(self, task: Task) -> Personal:
        model = Kept("model")
        return NotAModel("a relation module on class means", nearest=model) if self.relation else model

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        caption = "Below it the client's loss falls in a round, by corollary 1 as estimated in its last one."
        names = {"weight": "λ", "rate": "η"} if self.bounds else {}
        bounds: dict[str, Diagnostic] = {
            f"{name}_bound": PerClient(
                title=f"Bound on {symbol}", caption=caption, kept=f"bounds/{name}", known="bounds/known"
            )
            for name, symbol in names.items()
        }
        return bounds | {
            "class_means": ClassVectors(
                title="Class means",
                caption="The global class means and those of each client.",
                server="means",
                server_known="known",
                kept="own/means",
                kept_known="own/known",
            )
        }

    def predict(self, task: Task, client: Tree, down: Messages, x: Tensor) -> Tensor:
        model = part(client, "model")
        if not self.relation:
            return task.predict(model, x)
        mixed, known = leaf(part(client, "mixed"), "means"), leaf(part(client, "mixed"), "known")
        own_classes = leaf(part(client, "own"), "known")
        z = task.features(model, x)
        scores = relation_scores(part(client, "relation"), z, mixed).where(known, -torch.inf)
        ready = own_classes.any() & (known | ~own_classes).all()
        return torch.where(ready, scores, task.logits(part(model, "head"), z))


def _squared_norm(values: Tree) -> Tensor:
    """The squared norm over all leaves."""
    return torch.stack([entry.square().sum() for _, entry in tree.leaves(values)]).sum()


CHANNELS, KERNEL, HIDDEN = 8, 3, 64


def init_relation(rng: np.random.Generator, num_features: int) -> Tree:
    """Initial weights by PyTorch's default initialisation, for features of width d."""
    fan_in = 2 * KERNEL
    return {
        "conv": {"weight": uniform(rng, (CHANNELS, 2, KERNEL), fan_in), "bias": uniform(rng, (CHANNELS,), fan_in)},
        "fc1": linear(rng, CHANNELS * num_features, HIDDEN),
        "fc2": linear(rng, HIDDEN, 1),
    }


def relation_scores(weights: Tree, z: Tensor, class_features: Tensor) -> Tensor:
    """g([z_s; c_j]) in 0..1 for every pair, [B, K].

    A pair is a signal of length d with two channels: Conv1d(2 -> 8, kernel 3, padding 1), ReLU, fc 64, ReLU, fc 1,
    sigmoid.

    Args:
        weights: as `init_relation` returns them.
        z: [B, d].
        class_features: [K, d].
    """
    conv, fc1, fc2 = part(weights, "conv"), part(weights, "fc1"), part(weights, "fc2")
    samples, classes = len(z), len(class_features)
    channels = z.unsqueeze(1).expand(-1, classes, -1), class_features.expand(samples, -1, -1)
    pairs = torch.stack(channels, 2)  # [B, K, 2, d]
    signals = F.conv1d(pairs.flatten(0, 1), leaf(conv, "weight"), leaf(conv, "bias"), padding=KERNEL // 2)
    hidden = F.relu(F.linear(F.relu(signals).flatten(1), leaf(fc1, "weight"), leaf(fc1, "bias")))
    return F.linear(hidden, leaf(fc2, "weight"), leaf(fc2, "bias")).sigmoid().view(samples, classes)

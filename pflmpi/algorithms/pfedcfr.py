"""pFedCFR: feature layers are fused for each client, decision layers are averaged for all."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import chain, pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round
from pflmpi.algorithms.distances import attention, inner_products, squared_distances, weighted_sums
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, model_loss, squared_distance
from pflmpi.learning.diagnostics import ClientWeights, Diagnostic
from pflmpi.learning.parts import overlay, select_parts
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Downlink, Mean, Messages, Own, Rows, Shared, Uplink
from pflmpi.tree import Tree, part

Layer = tuple[str, ...]  # the paths of its tensors, weight first


@dataclass(frozen=True, kw_only=True)
class PFedCFR(Algorithm):
    """Yang et al., Cross-Fusion Rule for Personalized Federated Learning, 2023.

    Server, for each layer l <= r by itself, with distances of that layer alone (eq. 10):

        v'_n = (1 - sum_{m != n} zeta_nm) v_n + sum_{m != n} zeta_nm v_m,  zeta_nm = alpha A'(||v_n - v_m||^2),

    A(x) = 1 - exp(-x / sigma); for each layer l > r the plain mean over clients (eq. 12). Client (eq. 15):
    min F_n(v) + lambda / (2 alpha) sum_{l <= r} ||v_l - v'_l||^2 + mu / 2 sum_{l > r} ||v_l - v_global,l||^2.

    Up: the layers l <= r; the layers l > r, averaged. Down: the client's own fused layers l <= r; the common layers l
    > r. Persists: client: its model, its last fused layers l <= r (at first the initial ones); server: the common
    layers. Evaluated: the client's model after local training, which is the output v_n^T of algorithm 1.

    Readings. `num_personal_layers: null` is the paper's threshold by function (eq. 8): the layers before the first
    fully connected one, and at least the first (r = 1 of 2 for its DNN, 2 of 4 for its CNN). A layer is a module,
    weight and bias together; `layer_unit: tensor` counts tensors, as for ResNet-18, where r = 56 of 64 was best
    (here resnet18 with `hidden`, and null is 60). The general form (eqs. 7, 8) has a rule for each group of layers:
    with `thresholds` [l_1, l_2, ...] layers 1 to l_1 have the first of `rules`, l_1 + 1 to l_2 the second and so on;
    attention is eqs. 10 and 11, mean eqs. 12 and 13, and own layers are neither sent nor in the proximal term. Local
    training starts from the received layers, or with `start: local` from the own model. Batch-norm statistics are not
    layers, as they are not among the 64: they stay with the client, whatever `training.bn` says.

    Departures. With partial participation the layers of the round's participants are fused, and a client uses its
    fused layers in its next participation. A configuration with which a self weight could be negative is refused.

    Newcomers: the server has no layers of theirs to compare, so they receive the mean of the others' fused layers with
    the common ones, and train from these whatever `start` is; ours, the paper has a fixed set of clients.
    """

    summary: ClassVar[str] = "feature layers fused by distance, decision layers averaged"
    paper: ClassVar[str] = "Yang et al., 2023"
    search: ClassVar = {"alpha": (1e2, 1e5, "log"), "prox_weight": (0.01, 10.0, "log")}
    any_task: ClassVar[bool] = True

    num_personal_layers: Annotated[int | None, Field(ge=0, description="the fused layers (r); null: the body")] = None
    thresholds: Annotated[
        list[int] | None,
        Field(description="last layer of each group but the last; null: num_personal_layers alone"),
    ] = None
    rules: Annotated[
        list[Literal["attention", "mean", "own"]] | None,
        Field(description="of each group: fused by distance, averaged, or the client's own; null: attention, mean"),
    ] = None
    layer_unit: Annotated[Literal["module", "tensor"], Field(description="what counts as a layer")] = "module"
    alpha: Annotated[float, Field(gt=0, description="step size of the fusion (alpha_t)")] = 1e4
    sigma: Annotated[float, Field(gt=0, description="scale of squared distances")] = 1e6
    prox_weight: Annotated[float, Field(ge=0, description="pull to fused layers (lambda)")] = 1.0
    decision_prox_weight: Annotated[float, Field(ge=0, description="pull to the mean (mu)")] = 0.001
    start: Annotated[Literal["fused", "local"], Field(description="model that training starts from")] = "fused"

    def check(self, task: Task, participants: int) -> None:
        self._check_thresholds(task)
        personal, decision = self.split(task)
        if len(personal) < (self.num_personal_layers or 0):
            raise ConfigError(
                f"algorithm.num_personal_layers = {self.num_personal_layers}, but model {task.architecture.name} has "
                f"{len(personal + decision)} layers with algorithm.layer_unit = {self.layer_unit}; choose at most that"
            )
        if personal and (participants - 1) * self.alpha > self.sigma:
            raise ConfigError(
                f"algorithm.alpha = {self.alpha:g} and algorithm.sigma = {self.sigma:g} can make the weight of a "
                f"client's own layers negative with P = {participants} participants: (P - 1) alpha / sigma is "
                f"{(participants - 1) * self.alpha / self.sigma:g}, allowed is at most 1; "
                f"choose algorithm.alpha of at most {self.sigma / (participants - 1):g}, or a larger algorithm.sigma"
            )

    def _check_thresholds(self, task: Task) -> None:
        layers, ends, rules = self._layers(task)
        rising = ends == sorted({*ends} & {*range(1, len(layers))})
        valid = self.thresholds is None or (rising and self.num_personal_layers is None)
        if len(ends) != len(rules) - 1 or not valid:
            raise ConfigError(
                f"algorithm.thresholds = {self.thresholds} with algorithm.rules = {rules}, and {len(layers)} layers of "
                f"{task.architecture.name}: give {len(rules) - 1} rising thresholds from 1 to {len(layers) - 1}, "
                "and no algorithm.num_personal_layers"
            )

    def split(self, task: Task) -> tuple[list[Layer], list[Layer]]:
        """The personal layers (eq. 10) and the decision layers (eq. 12) in forward order."""
        layers, ends, rules = self._layers(task)
        layers_by_rule: dict[str, list[Layer]] = {"attention": [], "mean": [], "own": []}
        for rule, (first, end) in zip(rules, pairwise((0, *ends, len(layers))), strict=True):
            layers_by_rule[rule] += layers[first:end]
        return layers_by_rule["attention"], layers_by_rule["mean"]

    def _layers(self, task: Task) -> tuple[list[Layer], list[int], list[str]]:
        """All layers in forward order, the end of each group but the last, and the groups' rules."""
        weights = dict(tree.leaves(task.like(*TRAINED_PARTS)))
        layers: list[Layer] = [*task.layers.values()]
        r = max(1, next(i for i, (weight, *_) in enumerate(layers) if weights[weight].ndim == 2))
        if self.layer_unit == "tensor":
            layers, r = [(path,) for path in chain(*layers)], sum(map(len, layers[:r]))
        r = r if self.num_personal_layers is None else self.num_personal_layers
        return layers, [r] if self.thresholds is None else self.thresholds, [*(self.rules or ("attention", "mean"))]

    def _parts(self, task: Task, model: Tree) -> Messages:
        """The personal and the decision layers of a model, without empty groups."""
        groups = zip(("personal", "decision"), self.split(task), strict=True)
        return {name: select_parts(model, chain(*layers)) for name, layers in groups if layers}

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        parts = self._parts(task, task.like(*TRAINED_PARTS)).items()
        return {name: Rows(like) if name == "personal" else Mean(like, "clients") for name, like in parts}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        parts = self._parts(task, task.like(*TRAINED_PARTS)).items()
        return {name: Own(like, kept=True) if name == "personal" else Shared(like) for name, like in parts}

    def init_server(self, task: Task) -> Tree:
        return {name: layers for name, layers in self._parts(task, task.init()).items() if name == "decision"}

    def init_client(self, task: Task) -> Tree:
        return {"model": task.init()}

    def init_received(self, task: Task) -> Messages:
        return {name: layers for name, layers in self._parts(task, task.init()).items() if name == "personal"}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {name: part(server, name) for name in server}

    def begin_as_newcomer(self, task: Task, client: Tree, down: Messages) -> Tree:
        return {"model": reduce(overlay, down.values(), part(client, "model"))}

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        plain, own, received = model_loss(task), part(client, "model"), tuple(down)
        strengths = {"personal": self.prox_weight / (2 * self.alpha), "decision": self.decision_prox_weight / 2}

        def loss(model: Tree, batch: Batch) -> Tensor:
            value = plain(model, batch)
            for name in received:
                value = value + strengths[name] * squared_distance(model, part(model, name))
            return value

        begin = own if self.start == "local" else reduce(overlay, down.values(), own)
        model = train(task, begin, data.passes["train"], loss, data.learning_rate, fixed={**down})
        return {"model": model}, self._parts(task, model)

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        return {name: up[name] for name in server}

    def answer(self, task: Task, server: Tree, up: Messages, round: Round) -> Messages:
        fused: dict[str, Tensor] = {}
        for layer in self.split(task)[0]:
            weights = self.weights(up["personal"], layer)
            fused |= {path: weighted_sums(weights, tree.at(up["personal"], path)) for path in layer}
        return {"personal": tree.unflatten(fused)}

    def weights(self, models: Tree, layer: Layer) -> Tensor:
        """The fusion weights zeta [P, P] of one layer (eq. 10) of the models [P, ...], self weights on the diagonal."""
        products = tree.map(lambda rows: inner_products(rows, from_first=True), select_parts(models, layer))
        zeta = attention(squared_distances(products), self.alpha, self.sigma)
        return zeta + torch.diag(1 - zeta.sum(1))

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            name: ClientWeights(
                title=f"Weights of the fused layers: {_layer_name(layer)}",
                caption=f"The weight ζ of a participant's layer {_layer_name(layer)} (column) in another's fused "
                "layer.",
            )
            for name, layer in self._reported_layers(task).items()
        }

    def diagnose(self, task: Task, server: Tree, up: Messages, round: Round) -> Mapping[str, Tensor]:
        return {name: self.weights(up["personal"], layer) for name, layer in self._reported_layers(task).items()}

    def _reported_layers(self, task: Task) -> dict[str, Layer]:
        """The first and the last personal layer, by the names of their diagnostics."""
        personal, _ = self.split(task)
        layers = (personal[0], personal[-1]) if personal else ()
        return {f"fusion_weights_{_layer_name(layer).replace('/', '_')}": layer for layer in layers}

    def personal(self, task: Task) -> Personal:
        return Kept("model")


def _layer_name(layer: Layer) -> str:
    """The module of a layer, or its only tensor."""
    return layer[0].rpartition("/")[0] if len(layer) > 1 else layer[0]

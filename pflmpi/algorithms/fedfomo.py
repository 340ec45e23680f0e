"""FedFomo: every client mixes a few others' models, weighted by their gain on its held-out samples."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import TRAINED_PARTS, Algorithm, Round, only
from pflmpi.errors import ConfigError
from pflmpi.learning.client import Batch, ClientData, model_loss, squared_distance, task_loss
from pflmpi.learning.diagnostics import ClientWeights, Diagnostic
from pflmpi.learning.personal import Kept, Personal
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import NOBODY, Downlink, Messages, Own, Rows, Uplink, tensor, with_rows
from pflmpi.rng import stream
from pflmpi.tree import Tree, leaf, part


@dataclass(frozen=True, kw_only=True)
class FedFomo(Algorithm):
    """Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

    On its held-out samples client i measures the mean loss L_i of theta', its model before its last local training, and
    of the candidates theta_n: its model after that training, and up to M models of other clients. It mixes them by

        w_n = (L_i(theta') - L_i(theta_n)) / (||theta_n - theta'|| + 1e-5),
        theta <- theta' + sum_n max(w_n, 0) / sum_m max(w_m, 0) (theta_n - theta'),

    and then trains theta on its other samples. The server keeps the affinities P [N, N], P_in += w_n. A participant of
    the next round receives M models: each is that of the remaining client n with the highest P_in or, with probability
    epsilon, of any remaining client.

    Up: the model and the raw w_n of the received models. The model stays with its client until it is chosen, and is
    sent from there to its receivers. Down: M models and the ids of their clients, M (4 x parameters + 8) bytes even
    with fewer candidates. Persists: client: its model and theta' (batch-norm statistics too), and for reports the ids
    of the clients in its last mix and the shares max(w_n, 0) / sum_m max(w_m, 0), its own first; server: P, which
    clients have trained, and the round. Evaluated: the client's model after its training.

    Readings. A client's own model is always a candidate and need not be sent, so M counts others, and the paper's
    initial P = diag(1, ..., 1) is P = 0. If no w_n is positive the client continues with its own model after training;
    by the equation it would be theta', which would undo every round that does worse on a few held-out samples. A model
    that has never been trained is not a candidate. epsilon falls by `exploration_decay` per round, from 0.3 by 0.05 as
    in the authors' runs; ties between affinities are broken at random. The held-out samples are drawn once. Distances
    are over weights and biases in the L2 norm (the authors' code: L1).

    Newcomers: receive M models, any of those that have been trained (their affinities are unknown), then mix and train
    as in a first round, and again with the same models in further updates; ours, the paper has a fixed set of clients.
    """

    summary: ClassVar[str] = "every client weighs others' models on held out samples"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    any_task: ClassVar[bool] = True
    frozen_head: ClassVar[bool] = True

    received_models: Annotated[
        int, Field(ge=1, description="models of others that a client receives in a round (M)")
    ] = 5
    held_out: Annotated[
        float, Field(gt=0, lt=1, description="share of the training samples on which others' models are weighed")
    ] = 0.2
    exploration: Annotated[
        float, Field(ge=0, le=1, description="probability to ask for a random client's model (epsilon)")
    ] = 0.3
    exploration_decay: Annotated[
        float, Field(ge=0, le=1, description="what is taken off that probability in every round")
    ] = 0.05

    def check(self, task: Task, participants: int) -> None:
        if self.received_models >= task.num_clients:
            raise ConfigError(
                f"algorithm.received_models is {self.received_models}, but a client has {task.num_clients - 1} others "
                "to receive models from; lower it, or have more clients"
            )
        if task.training.drop_last:
            raise ConfigError(
                "training.drop_last is true, which leaves clients with fewer held out samples than "
                f"training.batch_size = {task.training.batch_size} nothing to weigh models with; set it to false"
            )

    def uplink(self, task: Task) -> Mapping[str, Uplink]:
        weights = Rows({"weights": tensor(self.received_models)})
        return {"model": Rows(task.like(*_mixed_parts(task)), kept=True), "weights": weights}

    def downlink(self, task: Task) -> Mapping[str, Downlink]:
        models = with_rows(task.like(*_mixed_parts(task)), self.received_models)
        clients = tensor(self.received_models, dtype=torch.int64)
        return {"candidates": Own({"model": models, "clients": clients}, of="model")}

    def passes(self, task: Task, round: int) -> Mapping[str, Pass]:
        held_out = Pass(epochs=1, held_out=self.held_out, side="held_out")
        return {"train": Pass(held_out=self.held_out), "held_out": held_out}

    def init_server(self, task: Task) -> Tree:
        num_clients = task.num_clients
        return {
            "affinity": torch.zeros(num_clients, num_clients),
            "trained": torch.zeros(num_clients, dtype=torch.bool),
            "round": torch.zeros((), dtype=torch.int64),
        }

    def init_client(self, task: Task) -> Tree:
        model, count = task.init(), self.received_models
        own_model: Tree = {"clients": torch.full((count,), NOBODY), "shares": torch.eye(1 + count)[0]}
        return {"model": model, "before": only(model, _mixed_parts(task)), "mix": own_model}

    def publish(self, task: Task, server: Tree, receivers: np.ndarray) -> Messages:
        return {"candidates": {"clients": self._choose_candidates(task, server, receivers)}}

    def publish_to_newcomers(self, task: Task, server: Tree, newcomers: np.ndarray) -> Messages:
        trained = np.flatnonzero(leaf(server, "trained").numpy())
        candidates = np.full((len(newcomers), self.received_models), NOBODY, np.int64)
        for row, client in zip(candidates, newcomers.tolist(), strict=True):
            order = stream(task.seed, 0, client, "candidates").permutation(task.num_clients)
            drawn = order[np.isin(order, trained)][: len(row)]
            row[: len(drawn)] = drawn
        return {"candidates": {"clients": torch.from_numpy(candidates)}}

    def _choose_candidates(self, task: Task, server: Tree, clients: np.ndarray) -> Tensor:
        """The clients whose models some clients [m] receive after the server's last round, [m, M]."""
        num_clients, count, round = task.num_clients, self.received_models, int(leaf(server, "round"))
        draws = draw_numbers(partial(stream, task.seed, round, -1, "candidates"), clients, num_clients, count)
        eligible = leaf(server, "trained").numpy() & (clients[:, np.newaxis] != np.arange(num_clients))
        epsilon = max(0.0, self.exploration - self.exploration_decay * (round - 1))
        affinity = leaf(server, "affinity").numpy()[clients]
        return torch.from_numpy(choose_candidates(affinity, eligible, count, epsilon, draws))

    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        model, before = part(client, "model"), part(client, "before")
        received, clients = part(down["candidates"], "model"), leaf(down["candidates"], "clients")
        others = [tree.map(lambda leaf, m=m: leaf[m], received) for m in range(self.received_models)]
        candidates = [only(model, _mixed_parts(task)), *others]
        losses = mean_losses(task, [{**model, **other} for other in (before, *candidates)], data.passes["held_out"])
        weights = weigh_candidates(losses, before, candidates)
        weights = torch.cat([weights[:1], weights[1:].where(clients != NOBODY, 0)])
        shares = normalize_weights(weights)
        start = mix_models(candidates, shares)
        model = train(task, {**model, **start}, data.passes["train"], model_loss(task), data.learning_rate)
        state: Tree = {"model": model, "before": start, "mix": {"clients": clients, "shares": shares}}
        return state, {"weights": {"weights": weights[1:]}}

    def server_update(self, task: Task, server: Tree, up: Messages, round: Round) -> Tree:
        rows, affinity = torch.from_numpy(round.participants), leaf(server, "affinity")
        sent = self._choose_candidates(task, server, round.participants)
        # The weight of `NOBODY` is 0, so that adding it to client 0 changes nothing.
        gain = torch.zeros(len(rows), len(affinity)).scatter_add(1, sent.clamp(min=0), leaf(up["weights"], "weights"))
        return {
            "affinity": affinity.index_add(0, rows, gain),
            "trained": leaf(server, "trained").index_fill(0, rows, True),
            "round": torch.tensor(round.number),
        }

    def diagnostics(self, task: Task) -> Mapping[str, Diagnostic]:
        return {
            "mixing_shares": ClientWeights(
                title="Shares in the mixed models",
                caption="The share of each model (column) in the mix with which a participant (row) began its "
                "training: of its own, on the diagonal, and of those that it was sent. A row sums to 1; 0 where a "
                "model did not lower the loss on held out samples.",
                kept="mix/shares",
                clients="mix/clients",
                limits=(0.0, 1.0),
            ),
            "affinity": ClientWeights(
                title="Affinities",
                caption="What another's model (column) has been worth to a client (row), added up over the rounds: the "
                "sum of its raw weights w. Positive: it lowered the loss on held out samples. The client's weight for "
                "its own model stays with it.",
                server="affinity",
            ),
        }

    def personal(self, task: Task) -> Personal:
        return Kept("model")


def _mixed_parts(task: Task) -> tuple[str, ...]:
    """The parts of a model that travel and are mixed."""
    return *TRAINED_PARTS, *task.shared_stats


@dataclass(frozen=True)
class Draws:
    """Random numbers, uniform in [0, 1), for choosing models."""

    ties: np.ndarray  # [m, N] decide between equal affinities
    lot: np.ndarray  # [m, N] choose when a client explores
    explores: np.ndarray  # [count, m] decide whether a client explores


def mean_losses(task: Task, models: list[Tree], batches: Iterable[Batch]) -> Tensor:
    """The mean loss of each model over all samples of the batches, [models]."""
    total = samples = torch.zeros((), device=task.device)
    with torch.no_grad():
        for batch in batches:
            losses = [task_loss(task, task.predict(model, batch.x), batch) for model in models]
            size = batch.count
            total, samples = total + size * torch.stack(losses), samples + size
    return total / samples


def weigh_candidates(losses: Tensor, before: Tree, candidates: list[Tree]) -> Tensor:
    """The raw weights w_n of the candidates, [candidates].

    Args:
        losses: [1 + candidates], that of `before` first.
        before: the model to which the candidates are compared.
        candidates: models of the same form.
    """
    parts = only(before, TRAINED_PARTS)
    distances = torch.stack([squared_distance(candidate, parts) for candidate in candidates]).sqrt()
    return (losses[0] - losses[1:]) / (distances + 1e-5)


def normalize_weights(weights: Tensor) -> Tensor:
    """max(w_n, 0) / sum_m max(w_m, 0), [candidates]; 1 for the first if no weight is positive."""
    positive = weights.clamp(min=0)
    first = torch.arange(len(weights), device=weights.device) == 0
    positive = torch.where(positive.sum() > 0, positive, first.to(positive.dtype))
    return positive / positive.sum()


def mix_models(candidates: list[Tree], shares: Tensor) -> Tree:
    """The sum of the candidates times their shares [candidates]; leaves that are not floating are the first's."""

    def combined(*leaves: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(shares, torch.stack(leaves), dims=([0], [0]))
        return total

    return tree.mix(combined, candidates[0], *candidates[1:])


def draw_numbers(
    stream_after: Callable[[int], np.random.Generator], clients: np.ndarray, num_clients: int, count: int
) -> Draws:
    """The random numbers of some clients [m]; those of a client do not depend on the others.

    Args:
        stream_after: the round's generator after a number of skipped draws.
        num_clients: of the whole run.
        count: models that each client receives.
    """
    n = num_clients
    ties, lot = (
        np.array([stream_after((table * n + client) * n).random(n) for client in clients.tolist()]).reshape(-1, n)
        for table in (0, 1)
    )
    return Draws(ties, lot, stream_after(2 * n * n).random((count, n))[:, clients])


def choose_candidates(
    affinity: np.ndarray, eligible: np.ndarray, count: int, epsilon: float, draws: Draws
) -> np.ndarray:
    """The clients whose models some clients receive, [m, count] int64; `NOBODY` once none is eligible.

    Args:
        affinity: [m, N], of a client (row) to the model of another.
        eligible: [m, N] bool, the clients whose models each may receive.
        epsilon: the probability, for each of the count, to choose any eligible model instead of the best.
        draws: random numbers of these clients.
    """
    remaining, rows = eligible.copy(), np.arange(len(eligible))
    chosen = np.full((len(eligible), count), NOBODY, np.int64)
    for index in range(count):
        explores = (draws.explores[index] < epsilon)[:, np.newaxis]
        masked = np.where(remaining, affinity, -np.inf)
        candidates = remaining & (explores | (masked == masked.max(1, keepdims=True)))
        best = np.where(candidates, np.where(explores, draws.lot, draws.ties), -1).argmax(1)
        chosen[:, index] = np.where(remaining.any(1), best, NOBODY)
        remaining[rows, best] = False
    return chosen

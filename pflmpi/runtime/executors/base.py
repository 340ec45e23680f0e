"""Executors, which compute the clients of a rank: `Loop` one after another, `Lanes` (lanes.py) many in one call."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm, training_passes
from pflmpi.data.federation import Federation
from pflmpi.learning.client import ClientData, Passes
from pflmpi.learning.local_training import OPTIMIZER, LocalTraining
from pflmpi.learning.measures import Measure
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass, count_samples, draw_batches, draw_share, select_samples
from pflmpi.learning.transforms import Transform
from pflmpi.messages.declared import is_folded
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.rng import stream
from pflmpi.runtime.contract import calling, check_state, collect_inputs, state_and_messages
from pflmpi.runtime.counts import Counts, count_results, predict_batches
from pflmpi.runtime.executors.batches import ClientBatches, Pool, split_in_order
from pflmpi.runtime.executors.transfers import Update, download_all, download_update, find_streams, upload
from pflmpi.tree import Tree

LocalUpdate = Callable[[Task, Tree, Messages, ClientData], tuple[Tree, Messages]]

TRAIN = "/train"  # key of a client's whole training split among its passes, whose names have no slash


@dataclass(frozen=True)
class Executor(ABC):
    """Data, models and algorithm for computing clients; subclasses compute one or many at a time."""

    algorithm: Algorithm
    tasks: tuple[Task, ...]  # one task per cohort, on the device of the rank
    cohort: np.ndarray  # [N] the cohort of each client
    federation: Federation  # the samples of each client
    pool: Pool  # the samples of at least the clients that this rank computes
    eval_batch: int  # samples per forward pass outside training
    transform: Transform | None = None  # augmentation of training samples; None for none
    measures: Mapping[str, Measure] = field(default_factory=dict)  # measures besides accuracy, F1 and loss, by name
    first_test: int = 1  # the first round with an evaluation

    def update(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Update]:
        """Start the local updates of the participants in one group; see `local_update`."""
        return self.local_update(self.algorithm.client_update, clients, states, down, round)

    def join(self, clients: np.ndarray, states: Tree, down: Messages, round: int, updates: int) -> Tree:
        """Returns the states of one group's newcomers after local updates, the first of which is in round `round`."""

        def begin_as_newcomer(task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            return self.algorithm.begin_as_newcomer(task, client, down), {}

        def train_as_newcomer(task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
            return self.algorithm.train_as_newcomer(task, client, down, data), {}

        if type(self.algorithm).begin_as_newcomer is not Algorithm.begin_as_newcomer:
            states = self.local_update(begin_as_newcomer, clients, states, down, round)().states
        for number in range(updates):
            states = self.local_update(train_as_newcomer, clients, states, down, round + number)().states
        return states

    @abstractmethod
    def local_update(
        self, method: LocalUpdate, clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Callable[[], Update]:
        """Start a local update of one group's clients; call the result to wait for it.

        Args:
            method: method of the algorithm for ONE client.
            clients: [m] ids, of one cohort.
            states: tree of [m, ...] on the host, with the optimizer's state under `OPTIMIZER` if it is kept.
            down: messages [m, ...], on the host.
            round: counts from 1.
        """

    @abstractmethod
    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        """Start testing the personal models of one group's clients; call the result to wait for it."""

    def untested(self, clients: Sequence[int] | np.ndarray) -> Counts:
        """Empty counts of the given clients."""
        total, task_kind = self.federation.test_class_counts[np.asarray(clients, np.int64)], self.tasks[0].kind
        return Counts.none(total, self.measures, task_kind.classes)

    def task(self, clients: np.ndarray) -> Task:
        """The task of the clients' cohort."""
        return self.tasks[int(self.cohort[clients[0]])]

    @abstractmethod
    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        """The introductions [m, ...] of one group's clients, on the host."""

    def kept_on_device(self, task: Task) -> frozenset[str]:
        """Names of the messages up that stay on the device until they are summed; none on a CPU."""
        up = {} if self.device.type == "cpu" else self.algorithm.uplink(task)
        return frozenset(name for name, kind in up.items() if is_folded(kind))

    def passes(self, clients: np.ndarray, round: int) -> dict[str, Pass]:
        return dict(self.algorithm.passes(self.task(clients), round))

    def wrap_method(self, method: LocalUpdate) -> Callable[[Task, Tree, Messages, ClientData], Tree]:
        """Wraps a method: checks what it returns, adds the training loss, and handles the optimizer's state."""

        @functools.wraps(method)
        def update(task: Task, client: Tree, down: Messages, data: ClientData) -> Tree:
            before = tree.part(client, OPTIMIZER) if OPTIMIZER in client else None
            local = LocalTraining(before, self.algorithm.measured)
            state = {name: value for name, value in client.items() if name != OPTIMIZER}
            returned = method(task.replace(local=local), state, down, data)
            new_state, up = state_and_messages(self.algorithm, method.__name__, returned)
            check_state(self.algorithm, method.__name__, new_state, state)
            optimizer: Tree = {} if before is None else {OPTIMIZER: local.states}
            return {"state": {**new_state, **optimizer}, "up": {**up}, "loss": local.mean_loss(data.class_counts)}

        return update

    def passes_to_adapt(self, clients: np.ndarray, round: int) -> dict[str, Pass]:
        passes = self.passes(clients, round)
        return {name: length for name, length in passes.items() if name in self.algorithm.adapts_with}

    def order(self, client: int, round: int, name: str, length: Pass, state: Tree) -> list[np.ndarray]:
        """The samples of each batch in one of a client's passes in a round.

        Args:
            state: the client's state, which may have the number of repetitions (`Pass.times`).
        """
        task, samples = self.tasks[self.cohort[client]], self.federation.train[client]
        if length.held_out:
            samples = select_samples(samples, length, stream(task.seed, 0, client, "held out"))
        if length.share < 1:
            samples = draw_share(samples, length, stream(task.seed, round, client, "share"))
        times = int(tree.at(state, length.times)) if length.times else 1
        rng, max_steps = stream(task.seed, round, client, f"batches/{name}"), self.participation.most_steps
        batches = draw_batches(rng, len(samples), task.training, length, times)
        if max_steps is not None and client < len(max_steps) and name in training_passes(self.algorithm, task, round):
            batches = batches[: max_steps[client]]
        return [samples[batch] for batch in batches]

    @functools.cached_property
    def participation(self) -> Participation:
        task = self.tasks[0]
        return Participation(task.training, task.seed, self.federation.num_train[: task.num_clients])

    def simulated_seconds(self, clients: np.ndarray, round: int) -> float | None:
        """Simulated seconds until the slowest of the participants has taken its steps; None if not configured."""
        participation, sizes = self.participation, self.federation.num_train
        if participation.seconds_per_step is None:
            return None
        training, max_steps, seconds = self.tasks[0].training, participation.most_steps, [0.0]
        for client in clients.tolist():
            passes = training_passes(self.algorithm, self.tasks[self.cohort[client]], round).values()
            steps = sum(training.num_steps(count_samples(int(sizes[client]), length), length) for length in passes)
            steps = steps if max_steps is None else min(steps, int(max_steps[client]))
            seconds.append(steps * float(participation.seconds_per_step[client]))
        return max(seconds)

    def decay(self, clients: np.ndarray, round: int) -> np.ndarray:
        """[m] float64, the factor on the learning rates of each client in a round."""
        training = self.tasks[0].training
        if training.decay_by == "rounds" or not round:
            return np.full(len(clients), training.decay(round))
        counts = self.participation.counts(round)
        num_participations = [counts[client] if client < len(counts) else 1 for client in clients]  # 1: a newcomer
        return np.array([training.decay(int(count)) for count in num_participations])

    def smoothing(self, length: Pass) -> float:
        """Label smoothing of a pass; none on held-out samples."""
        return self.tasks[0].training.label_smoothing if length.side == "rest" else 0.0

    def transforms(self, length: Pass) -> bool:
        """Whether the samples of a pass are augmented; held-out samples are not."""
        return self.transform is not None and length.side == "rest"

    def keys(self, client: int, round: int, name: str, steps: int, purpose: str = "noise") -> Tensor:
        """[steps] int64, one key for each batch of a pass; on the host.

        Args:
            purpose: "noise", which an algorithm or model draws, or "transform".
        """
        rng = stream(self.tasks[0].seed, round, client, f"{purpose}/{name}")
        return torch.from_numpy(rng.integers(-(2**63), 2**63, steps, np.int64))

    def class_counts(self, clients: np.ndarray) -> Tensor:
        """[m, K] float32 training samples of each class, on the host."""
        return torch.from_numpy(self.federation.class_counts[clients].astype(np.float32))

    @property
    def batch(self) -> int:
        """Samples in one training step of a client."""
        return self.tasks[0].training.batch_size

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def ahead(self) -> int:
        """Number of groups that are started before one is waited for."""
        return 0 if find_streams(self.device) is None else 1

    @property
    def draws_noise(self) -> bool:
        """Whether batches need keys, because the algorithm or a model draws noise."""
        return self.algorithm.draws_noise or any(task.architecture.draws_noise for task in self.tasks)

    @property
    def adapts(self) -> bool:
        """Whether evaluation is preceded by an adaptation step."""
        return type(self.algorithm).adapt is not Algorithm.adapt


class Loop(Executor):
    """Client by client."""

    def _data(self, client: int, round: int, passes: Mapping[str, Pass], state: Tree) -> ClientData:
        task, decay = self.tasks[self.cohort[client]], float(self.decay(np.array([client]), round)[0])
        pool = self.pool.on_device([self.federation.train[client]])
        batches = {name: self.order(client, round, name, length, state) for name, length in passes.items()}
        keys: Tree = {}
        if self.draws_noise:
            keys = {name: self.keys(client, round, name, len(order)) for name, order in batches.items()}
        draws: Tree = {
            name: self.keys(client, round, name, len(order), "transform")
            for name, order in batches.items()
            if self.transforms(passes[name])
        }
        batches[TRAIN] = split_in_order(self.federation.train[client], self.eval_batch)
        counts = self.class_counts(np.array([client]))[0]
        uploaded = upload(
            {"orders": _concatenate_places(pool, batches), "keys": keys, "draws": draws, "counts": counts}, self.device
        )
        orders, keys, draws = (tree.part(uploaded, part) for part in ("orders", "keys", "draws"))
        client_batches = {
            name: ClientBatches(
                task,
                pool,
                tree.leaf(orders, name),
                [len(batch) for batch in order],
                tree.leaf(keys, name) if name in keys else None,
                self.smoothing(passes[name]) if name in passes else 0.0,
                self.transform,
                tree.leaf(draws, name) if name in draws else None,
            )
            for name, order in batches.items()
        }
        return ClientData(
            train=client_batches.pop(TRAIN),
            passes=Passes(client_batches),
            class_counts=tree.leaf(uploaded, "counts"),
            learning_rate=task.training.lr * decay,
            round=round,
            decay=decay,
        )

    def local_update(
        self, method: LocalUpdate, clients: np.ndarray, states: Tree, down: Messages, round: int
    ) -> Callable[[], Update]:
        task, passes, update = self.task(clients), self.passes(clients, round), self.wrap_method(method)
        results: list[Tree] = []
        uploaded = upload({"state": states, "down": {**down}}, self.device)
        for i, client in enumerate(clients):
            state = _select_row(tree.part(uploaded, "state"), i)
            received = as_messages(_select_row(tree.part(uploaded, "down"), i))
            data = self._data(int(client), round, passes, _select_row(states, i))
            reads = collect_inputs(state, received, data.class_counts)
            with calling(self.algorithm, method.__name__, round, [client], reads=reads, batch=self.batch):
                results.append(update(task, state, received, data))
        return download_update(_stack_results(results), self.kept_on_device(task), self.device)

    def introduce(self, clients: np.ndarray, states: Tree) -> Messages:
        task = self.task(clients)
        ups: list[Tree] = []
        uploaded = upload(states, self.device)
        for i, client in enumerate(clients):
            state, data = _select_row(uploaded, i), self._data(int(client), 0, {}, {})
            reads = collect_inputs(state, {}, data.class_counts)
            with calling(self.algorithm, "introduce", 0, [client], reads=reads, batch=self.batch):
                ups.append({**self.algorithm.introduce(task, state, data)})
        return as_messages(tree.to_host(_stack_results(ups)))

    def adapted(self, client: int, state: Tree, down: Messages, round: int) -> Tree:
        """The state that a client is tested with after a round, from its state and messages on the host."""
        if not self.adapts:
            return state
        group = np.array([client])
        data = self._data(client, round, self.passes_to_adapt(group, round), state)
        uploaded = upload({"state": state, "down": {**down}}, self.device)
        received = as_messages(tree.part(uploaded, "down"))
        return self._adapted(self.task(group), client, tree.part(uploaded, "state"), received, data)

    def _adapted(self, task: Task, client: int, state: Tree, received: Messages, data: ClientData) -> Tree:
        reads = collect_inputs(state, received, data.class_counts)
        first = self.first_test
        with calling(self.algorithm, "adapt", data.round, [client], reads=reads, batch=self.batch, first=first):
            return self.algorithm.adapt(task, state, received, data)

    def evaluate(self, clients: np.ndarray, states: Tree, down: Messages, round: int) -> Callable[[], Counts]:
        task, passes, scores = self.task(clients), self.passes_to_adapt(clients, round), []
        samples = self.federation.test
        pool = self.pool.on_device([samples[client] for client in clients])
        tests = {str(client): split_in_order(samples[client], self.eval_batch) for client in clients}
        uploaded = upload({"state": states, "down": {**down}, "tests": _concatenate_places(pool, tests)}, self.device)
        for i, client in enumerate(clients):
            state = _select_row(tree.part(uploaded, "state"), i)
            received = as_messages(_select_row(tree.part(uploaded, "down"), i))
            if self.adapts:
                data = self._data(int(client), round, passes, _select_row(states, i))
                state = self._adapted(task, int(client), state, received, data)
            sizes = list(map(len, tests[str(client)]))
            batches = ClientBatches(task, pool, tree.leaf(tree.part(uploaded, "tests"), str(client)), sizes)
            reads: dict[str, Tensor | Tree] = {"client": state, "down": {**received}}
            first = self.first_test
            with calling(self.algorithm, "predict", round, [client], reads=reads, batch=self.eval_batch, first=first):
                scores += predict_batches(self.algorithm, task, state, received, batches)
        wait = download_all(scores, self.device)
        no_scores = torch.empty(0, *task.score_shape)
        return lambda: count_results(self.federation, clients, torch.cat([no_scores, *wait()]), self.measures)


def _concatenate_places(pool: Pool, batches: Mapping[str, Sequence[np.ndarray]]) -> Tree:
    """Returns the positions in the pool of each pass's samples, batch after batch."""
    no_samples = np.empty(0, np.int64)
    return {
        name: torch.from_numpy(pool.places(np.concatenate([no_samples, *order]))) for name, order in batches.items()
    }


def _select_row(rows: Tree, index: int) -> Tree:
    """Returns the row of one client, only to be read; row 0 is a view, as it has the alignment of the whole tensor."""
    return tree.row(rows, index) if index else tree.map(lambda leaf: leaf[0], rows)


def _stack_results(results: list[Tree]) -> Tree:
    return tree.stack(results) if len(results) > 1 else tree.map(lambda leaf: leaf.unsqueeze(0), results[0])

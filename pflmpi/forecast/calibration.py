"""Calibration: training, testing and serving a few clients with the real executor, on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pflmpi import tree
from pflmpi.algorithms.base import Round, initial_client, initial_received
from pflmpi.forecast.costs import Calibration, CallCost, test_work
from pflmpi.forecast.process import Cost, measure, resident
from pflmpi.learning.task import HOST
from pflmpi.messages import mixing
from pflmpi.messages.chosen import Offers
from pflmpi.messages.downlink import send_down
from pflmpi.messages.folding.on_device import on_host
from pflmpi.messages.kinds import Messages
from pflmpi.messages.leaf_owners import LeafOwners
from pflmpi.messages.uplink import send_up
from pflmpi.runtime.executors import shared_model
from pflmpi.runtime.executors.transfers import device_message_limit
from pflmpi.runtime.round_schedule import RoundSchedule
from pflmpi.runtime.setup import Setup
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree

_SHORT = 1.0  # seconds that a longer call should take
_ALONE = InProcessTransport()


@dataclass(frozen=True)
class _Trial:
    """Clients of one group, each with the same number of samples, to be computed once.

    Attributes:
        setup: of the experiment, with these clients' data stretched or cut.
        clients: [m] ascending ids.
        states: tree of [m, ...].
        server: the server's state.
        steps: of one client in a round.
        tests: test samples of one client.
    """

    setup: Setup
    clients: np.ndarray
    states: Tree
    server: Tree
    steps: int
    tests: int

    def train(self) -> Messages:
        """What the clients send after a round."""
        return self.setup.executor.update(self.clients, self.states, self._down(), 1)().up

    def test(self) -> None:
        """Test the clients' personal models."""
        down = {name: value for name, value in self._down().items() if name in self.setup.algorithm.predicts_with}
        executor = self.setup.executor
        if self.setup.shares_model:
            shared_model.evaluate(executor, self.clients, {name: tree.row(one, 0) for name, one in down.items()}, 1)()
        else:
            executor.evaluate(self.clients, self.states, down, 1)()

    def _down(self) -> Messages:
        algorithm, task = self.setup.algorithm, self.setup.task
        published = algorithm.publish(task, self.server, self.clients)
        offers = Offers(np.zeros(task.num_clients, np.int64), _nothing)
        reply = send_down(_ALONE, self.setup.declared, published, [[self.clients]], offers=offers)
        first: list[Tree] = [{**initial_received(algorithm, task, int(client))} for client in self.clients]
        return {**reply.for_clients(self.clients), **tree.stack(first)}  # type: ignore[dict-item]


def calibrate(setup: Setup, first: RoundSchedule, groups: Sequence[np.ndarray], before: float) -> Calibration:
    """Calibration of a cohort, on the device of its data; it takes some seconds.

    Args:
        first: the first round.
        groups: clients of the cohort that are computed in one call: one with the fewest, and one with the most of them.
        before: bytes of this process before anything was computed.
    """
    executor, device = setup.executor, setup.executor.pool.images.device
    members = executor.cohort == executor.cohort[groups[-1][0]]
    samples, tests = int(executor.federation.num_train[members].max()), max(int(setup.num_test[members].max()), 2)
    width, few = min(setup.task.training.batch_size, samples), max(tests // 4, 1)
    server = setup.algorithm.init_server(setup.task)
    wide = _trial(setup, server, groups[-1], 1, width, few)
    measure(wide.train, device)
    measure(wide.test, device)
    library = max(resident() - before - tree.num_bytes(wide.states) - tree.num_bytes(server), 0)

    brief = measure(wide.train, device).seconds
    most = setup.task.training.steps or -(-samples // width)
    batches = min(most, max(2, int(_SHORT / max(brief, 1e-6))))
    cases = [
        _trial(setup, server, group, *size) for group in groups for size in ((1, width, few), (batches, width, tests))
    ]
    folding, serving = _server_costs(wide, first)
    return Calibration(
        train=CallCost.through([(len(one.clients), one.steps, measure(one.train, device)) for one in cases]),
        test=CallCost.through(
            [(len(one.clients), test_work(setup, one.steps, one.tests), measure(one.test, device)) for one in cases]
        ),
        fold=folding,
        serve=serving,
        library=library,
    )


def _server_costs(one: _Trial, first: RoundSchedule) -> tuple[Cost, Cost]:
    """Cost of folding the messages of a round, with the seconds of one, and of updating the server and publishing."""
    setup, algorithm, participants, sent = one.setup, one.setup.algorithm, first.participants, one.train()
    rows = torch.arange(len(participants)) % len(one.clients)  # the clients' own messages, again and again
    if tree.num_bytes({**sent}) * len(rows) > device_message_limit(setup.executor.device) * len(one.clients):
        sent = on_host(sent)
    others = replace(
        setup.declared,
        up={name: kind for name, kind in setup.declared.returned.items() if name not in setup.declared.compared},
    )
    up = {name: tree.map(lambda leaf: leaf.index_select(0, rows.to(leaf.device)), sent[name]) for name in others.up}
    few = LeafOwners.of(setup.declared, [[one.clients]])

    def fold() -> Messages:
        folded = send_up(_ALONE, others, [(participants, up)], [[participants]])
        assert folded is not None
        return folded

    def mix() -> tuple[Messages, Messages]:
        received, products = mixing.compare(_ALONE, few, [(one.clients, sent)], one.server)
        weights = algorithm.mixing_weights(setup.task, {**mine, **products}, Round(1, one.clients, setup.task.seed))
        sums = mixing.sum_centres(_ALONE, few, received, weights) if few.centres else {}
        if few.mixed:
            mixing.mix(_ALONE, few, received, weights)
        return products, sums

    def more(product: Tensor) -> Tensor:
        """The inner products of all participants and of the centres, from those of these clients and of the centres."""
        places = torch.cat([rows, torch.arange(len(one.clients), len(product))])
        return product[places][:, places]

    folded = fold()
    mine = send_up(_ALONE, others, [(one.clients, {name: sent[name] for name in others.up})], [[one.clients]]) or {}
    if few.compared:
        products, sums = mix()
        folded |= {**tree.map(more, {**products}), **sums}  # type: ignore[dict-item]

    def serve() -> None:
        now = Round(1, participants, setup.task.seed)
        if few.mixed or few.centres:
            algorithm.mixing_weights(setup.task, folded, now)
        server = algorithm.server_update(setup.task, one.server, folded, now)
        published = algorithm.publish(setup.task, server, first.receivers)
        send_down(_ALONE, setup.declared, published, [[first.receivers]])

    folding, serving = measure(fold, HOST), measure(serve, HOST)
    if few.compared:  # on the rank that owns most
        share = first.owners.row_bytes.max() / first.owners.row_bytes.sum()
        mixed = measure(mix, HOST).seconds * share * len(participants) / len(one.clients)
        serving = replace(serving, seconds=serving.seconds + mixed)
    return replace(folding, seconds=folding.seconds / len(participants)), serving


def _nothing(name: str, offer: Tree, clients: np.ndarray) -> Tree:
    """Zeros in the place of what clients offer; see `Offers`."""
    return tree.map(lambda leaf: torch.zeros(len(clients), *leaf.shape, dtype=leaf.dtype), offer)


def _trial(setup: Setup, server: Tree, clients: np.ndarray, batches: int, width: int, tests: int) -> _Trial:
    """Clients of one group with the given number of batches of `width` samples, and of test samples.

    Args:
        batches: are steps where `training.steps` says how many there are.
    """
    training, samples = setup.task.training, batches * width
    if training.steps is not None:
        training = training.model_copy(update={"steps": batches})
    train, test = list(setup.executor.federation.train), list(setup.executor.federation.test)
    for client in clients:
        train[client] = np.resize(train[client], samples)
        test[client] = np.resize(test[client] if len(test[client]) else train[client], tests)
    executor = replace(
        setup.executor,
        federation=replace(setup.executor.federation, train=tuple(train), test=tuple(test)),
        tasks=tuple(task.replace(training=training) for task in setup.executor.tasks),
    )
    setup = replace(setup, executor=executor)
    host = executor.task(clients).replace(device=HOST)
    states = tree.stack([initial_client(setup.algorithm, host, int(client)) for client in clients])
    return _Trial(setup, clients, states, server, training.num_steps(samples), tests)

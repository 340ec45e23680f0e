"""A few clients of an experiment, given a chosen number of samples, to be trained and tested by the real executor."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.learning.task import HOST
from pflmpi.messages.downlink import send_down
from pflmpi.messages.kinds import Messages
from pflmpi.messages.uplink import send_up
from pflmpi.runtime.setup import Setup
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Sample:
    """Clients of one group, with their state and what the server has sent them.

    Attributes:
        ready: of the experiment, with these clients' data stretched or cut.
        clients: [m] ascending ids.
        states: tree of [m, ...].
        server: the server's state.
        steps: of one client in a round.
        tests: test samples of one client.
    """

    ready: Setup
    clients: np.ndarray
    states: Tree
    server: Tree
    steps: int
    tests: int

    def train(self) -> Messages:
        """Return what the clients send after a round."""
        _, up = self.ready.executor.update(self.clients, self.states, self._down(), 1)
        return up

    def test(self) -> None:
        """Test the clients' personal models."""
        down = {name: value for name, value in self._down().items() if name in self.ready.algorithm.predicts_with}
        self.ready.executor.evaluate(self.clients, self.states, down, 1)

    def repeated(self, up: Messages, participants: np.ndarray) -> Messages:
        """Return messages [P, ...] of participants: the clients' own, again and again."""
        rows = torch.arange(len(participants)) % len(self.clients)
        return {name: tree.map(lambda leaf: leaf.index_select(0, rows), value) for name, value in up.items()}

    def fold(self, ups: Messages, participants: np.ndarray) -> Messages:
        """Return the messages of participants as the server gets them."""
        folded = send_up(_ALONE, self.ready.declared, [(participants, ups)], [[participants]], 1)
        assert folded is not None
        return folded

    def serve(self, folded: Messages, participants: np.ndarray, receivers: np.ndarray) -> None:
        """Update the server with what the participants have sent, and publish to the receivers."""
        algorithm, task = self.ready.algorithm, self.ready.task
        server = algorithm.server_update(task, self.server, folded, Round(1, participants, task.seed))
        send_down(_ALONE, self.ready.declared, algorithm.publish(task, server, receivers), [[receivers]])

    def _down(self) -> Messages:
        published = self.ready.algorithm.publish(self.ready.task, self.server, self.clients)
        return send_down(_ALONE, self.ready.declared, published, [[self.clients]]).for_clients(self.clients)


def sample(
    ready: Setup, clients: np.ndarray, batches: int, width: int, tests: int, server: Tree | None = None
) -> Sample:
    """Return clients of one group, each with the same number of samples.

    Args:
        ready: of the experiment.
        clients: [m] ascending ids.
        batches: of training samples; steps where `training.steps` says how many there are.
        width: samples of a batch.
        tests: test samples.
        server: of another sample; None to make it, which takes long where it has a state for each client.
    """
    training, samples = ready.task.training, batches * width
    if training.steps is not None:
        training = training.model_copy(update={"steps": batches})
    train, test = list(ready.executor.federation.train), list(ready.executor.federation.test)
    for client in clients:
        train[client] = np.resize(train[client], samples)
        test[client] = np.resize(test[client] if len(test[client]) else train[client], tests)
    federation = replace(ready.executor.federation, train=tuple(train), test=tuple(test))
    tasks = tuple(task.replace(training=training) for task in ready.executor.tasks)
    executor = replace(ready.executor, federation=federation, tasks=tasks)
    stretched = replace(ready, executor=executor)
    host = tasks[int(executor.cohort[clients[0]])].replace(device=HOST)
    states = tree.stack([ready.algorithm.init_client(host, int(client)) for client in clients])
    if server is None:
        server = _server(stretched, clients, states)
    return Sample(stretched, clients, states, server, training.num_steps(samples), tests)


def _server(ready: Setup, clients: np.ndarray, states: Tree) -> Tree:
    """Return the server's state before the first round, if these clients were all."""
    server = ready.algorithm.init_server(ready.task)
    if not ready.algorithm.introduces:
        return server
    introduced = ready.executor.introduce(clients, states)
    folded = send_up(_ALONE, ready.declared, [(clients, introduced)], [[clients]], 0)
    assert folded is not None
    return ready.algorithm.server_update(ready.task, server, folded, Round(0, clients, ready.task.seed))


_ALONE = InProcessTransport()

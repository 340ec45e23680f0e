"""A trial of local training, before the first round."""

from dataclasses import replace

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import initial_client
from pflmpi.data.unseen import Division
from pflmpi.learning.local_training import LocalTraining
from pflmpi.learning.task import HOST
from pflmpi.learning.training import Pass
from pflmpi.messages.kinds import as_messages
from pflmpi.rng import stream
from pflmpi.runtime.contract import calling
from pflmpi.runtime.executors.loop import Loop
from pflmpi.runtime.executors.padding_check import example
from pflmpi.tree import Tree


def only_first_client(division: Division) -> Division:
    """Client 0 with its training samples and no others, so that a trial does not bring all samples to the device."""
    mine, dataset = division.trained.train[0], division.trained.dataset
    dataset = replace(dataset, images=dataset.images[mine], labels=dataset.labels[mine])
    return replace(division, trained=replace(division.trained, dataset=dataset, train=(np.arange(len(mine)),)))


class OneStep(Loop):
    """Client by client, each pass no longer than its first batch."""

    def order(self, client: int, round: int, name: str, length: Pass, state: Tree) -> list[np.ndarray]:
        return super().order(client, round, name, length, state)[:1]

    def counts_loss(self, client: int, round: int) -> bool:
        """Whether a step of a client in a round counts for its training loss; what it has received is made up."""
        task, passes = self.tasks[self.cohort[client]], self.passes(np.array([client]), round)
        state = initial_client(self.algorithm, task.replace(device=HOST), client)
        rng, kinds = stream(task.seed, round, client, "one step"), self.algorithm.downlink(task)
        received: Tree = {name: example(kind, task, rng) for name, kind in kinds.items()}
        data, local = self._data(client, round, passes, state), LocalTraining(None, self.algorithm.measured)
        state, received = (tree.to(each, self.device) for each in (state, received))
        with calling(self.algorithm, "client_update", round, [client]):
            self.algorithm.client_update(task.replace(local=local), state, as_messages(received), data)
        return local.counted

"""The parts of a run that are the same in every round: executor, placement, messages, templates of client state."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.declared import Declared
from pflmpi.messages.groups import clients_of
from pflmpi.runtime.evaluation import is_model_shared
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.batches import Pool
from pflmpi.runtime.placement import Placement
from pflmpi.runtime.unseen import Unseen
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Setup:
    """The executor, the placement and the messages of a run.

    Attributes:
        executor: computes clients on this rank's device; its pool may have the samples of this rank's clients only.
        templates: one per cohort, the state of a client between rounds.
        unseen: clients that are kept out of training and tested; None if there are none.
    """

    executor: Executor
    placement: Placement
    declared: Declared
    templates: tuple[Tree, ...]
    unseen: Unseen | None

    @property
    def algorithm(self) -> Algorithm:
        return self.executor.algorithm

    @cached_property
    def task(self) -> Task:
        """The server's task, on the host."""
        return self.executor.tasks[0].replace(device=HOST)

    @cached_property
    def keeps_state(self) -> np.ndarray:
        """[N] bool, whether the client has state between rounds."""
        by_cohort = np.array([any(tree.leaves(template)) for template in self.templates])
        return np.asarray(by_cohort[self.executor.cohort])

    @cached_property
    def validation(self) -> Executor | None:
        """An executor that tests clients on their validation samples; None if there are none."""
        federation = self.executor.federation.for_validation
        return None if federation is None else replace(self.executor, federation=federation)

    @property
    def shares_model(self) -> bool:
        """Whether all clients predict with one model."""
        return is_model_shared(self.executor, self.placement.home)

    def samples(self, rank: int) -> np.ndarray | None:
        """The ascending indices of the samples that a rank needs; None if any client may be computed there.

        The first sample of the dataset is always among them, because it pads the batches of lanes.
        """
        placement = self.placement
        if placement.home is None and rank in placement.computing_ranks:
            return None
        samples = [np.zeros(1, np.int64), *_list_samples(self.executor, placement.hosted(rank))]
        if self.unseen is not None:
            samples += _list_samples(self.unseen.executor, clients_of(self.unseen.groups[rank]))
        return np.unique(np.concatenate(samples))

    def with_pool(self, pool: Pool) -> "Setup":
        unseen = self.unseen and replace(self.unseen, executor=replace(self.unseen.executor, pool=pool))
        return replace(self, executor=replace(self.executor, pool=pool), unseen=unseen)


def _list_samples(executor: Executor, clients: np.ndarray) -> list[np.ndarray]:
    sides = filter(None, (executor.federation.train, executor.federation.test, executor.federation.validation))
    return [samples[client] for samples in sides for client in clients]

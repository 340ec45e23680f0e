"""What the rounds of a run need."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.declared import Declared
from pflmpi.runtime.config import CheckpointConfig, EvaluationConfig
from pflmpi.runtime.evaluation.unseen import Unseen
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.placement import Placement
from pflmpi.tree import Tree


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same during a run.

    Attributes:
        executor: computes clients, on the device of this rank.
        placement: who computes what.
        declared: what travels.
        templates: one per cohort, what a client keeps between rounds.
        evaluation, checkpoint: sections of the configuration.
        timeout: seconds that a call waits for the other ranks; None follows the length of the rounds.
        skips: whether a round goes on without the clients that fail in it.
        seconds: [N, 3] measured of each client before this start; see `client_seconds`.
        balances: whether clients without a home are placed by them.
        unseen: clients that were kept out of training and are tested; None if there are none.
    """

    executor: Executor
    placement: Placement
    declared: Declared
    templates: tuple[Tree, ...]
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    timeout: float | None
    skips: bool
    seconds: np.ndarray
    balances: bool
    unseen: Unseen | None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self.executor.algorithm

    @cached_property
    def task(self) -> Task:
        """The server's task, on the host."""
        return self.executor.tasks[0].replace(device=HOST)

    @cached_property
    def keeps(self) -> np.ndarray:
        """[N] bool, whether a client keeps anything between rounds."""
        keeping = np.array([any(tree.leaves(template)) for template in self.templates])
        return np.array(keeping[self.executor.cohort])

    @cached_property
    def num_test(self) -> np.ndarray:
        """[N] test samples."""
        return self.executor.federation.num_test

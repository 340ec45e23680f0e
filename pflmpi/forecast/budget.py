"""Time budget of a sweep: its runs ordered by what `plan` predicts for them, and how many of them fit."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from pflmpi.config.load import Config
from pflmpi.errors import UserError
from pflmpi.forecast.cache import Cache
from pflmpi.forecast.forecast import Resources, predict
from pflmpi.sweep.pending import CellTask
from pflmpi.text import counted


@dataclass(frozen=True)
class RunCost:
    """Predicted seconds of a run: until it begins, and of a round."""

    start: float
    round: float


@dataclass(frozen=True)
class Budget:
    """What a sweep may take, and what its runs are expected to take.

    Attributes:
        hours: of the whole sweep.
        jobs: runs at a time.
        costs: by `but_seed`; not of those for which nothing could be predicted.
    """

    hours: float
    jobs: int
    costs: Mapping[str, RunCost]

    def seconds(self, task: CellTask) -> float:
        """Seconds that a run still needs; infinite where nothing could be predicted."""
        if not task.command:
            return 0.0
        cost = self.costs.get(but_seed(task))
        return inf if cost is None else cost.start + cost.round * (task.rounds - task.done)

    def cheapest_first(self, tasks: Sequence[CellTask]) -> list[CellTask]:
        """The tasks in the order of what they still need; equal ones as they were."""
        return sorted(tasks, key=self.seconds)

    def expected(self, tasks: Sequence[CellTask], seconds: float) -> str:
        """How many of the runs should fit into the seconds that are left, in words."""
        to_do = self.cheapest_first([task for task in tasks if task.command])
        fitting, used = 0, 0.0
        for task in to_do:
            used += self.seconds(task) / self.jobs
            fitting += used <= seconds
        runs = f"{fitting} of {counted(len(to_do), 'run')} should fit"
        return f"budget {self.hours:g} h: {runs}; they need {self.needed(to_do)}"

    def needed(self, tasks: Sequence[CellTask]) -> str:
        """The hours that the runs need together, in words."""
        known = [seconds for task in tasks if (seconds := self.seconds(task)) < inf]
        unknown = len(tasks) - len(known)
        more = f", and {counted(unknown, 'run')} of unknown length" if unknown else ""
        return f"about {sum(known) / self.jobs / 3600:.2f} h{more}"


def but_seed(task: CellTask) -> str:
    """The configuration of a run as text, but for its seed."""
    return json.dumps({**task.cell.raw, "seed": None}, sort_keys=True)


def run_costs(
    tasks: Sequence[tuple[CellTask, Config]],
    resources: Callable[[Config], Resources],
    imports: float,
    cache: Cache,
    update: Callable[[int, int], None],
) -> dict[str, RunCost]:
    """Costs of what is not done yet, by `but_seed`: the first seed stands for the others.

    Args:
        tasks: each with its configuration.
        resources: that a run has.
        imports: seconds that one process needs before it reads data.
        cache: of measurements of this machine.
        update: called with the number of predictions made, and of all.
    """
    first: dict[str, Config] = {}
    for task, config in tasks:
        if task.command:
            first.setdefault(but_seed(task), config)
    costs: dict[str, RunCost] = {}
    for number, (key, config) in enumerate(first.items()):
        update(number, len(first))
        try:
            forecast = predict(config, resources(config), cache)
        except UserError:
            continue  # the run itself will say why
        if forecast.seconds is not None:
            costs[key] = RunCost(forecast.start_up(imports), forecast.seconds.round)
    return costs

"""Time budget of a sweep: the cheapest runs first, by measured seconds of a round, else by steps x parameters."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

import numpy as np

from pflmpi import tree
from pflmpi.config.load import Config
from pflmpi.errors import UserError
from pflmpi.experiment.build import prepare
from pflmpi.learning.task import HOST
from pflmpi.store import metrics_file
from pflmpi.sweep.pending import CellTask
from pflmpi.text import pluralize


@dataclass(frozen=True)
class Budget:
    """The time that a sweep may take, and what its runs cost."""

    hours: float  # of the whole sweep
    jobs: int  # runs at a time
    tasks: Sequence[CellTask]  # all cells
    work: dict[str, float]  # steps x parameters of a round by `config_without_seed`, where known
    seconds_per_round: dict[str, float]  # likewise, of cells that have run

    def seconds(self, task: CellTask) -> float:
        """Estimates the seconds that a run still needs: as its configuration took, else by its work, else inf."""
        key, rounds = config_without_seed(task), task.rounds - task.done if task.command else 0
        if not rounds:
            return 0.0
        if key in self.seconds_per_round:
            return rounds * self.seconds_per_round[key]
        speeds = [seconds / self.work[other] for other, seconds in self.seconds_per_round.items() if other in self.work]
        return rounds * self.work[key] * median(speeds) if speeds and key in self.work else inf

    def cheapest_first(self) -> list[CellTask]:
        """All tasks, sorted by the time that they still need (stable)."""

        def cost(task: CellTask) -> tuple[float, float]:
            return self.seconds(task), self.work.get(config_without_seed(task), inf) * (task.rounds - task.done)

        return sorted(self.tasks, key=cost)

    def expected(self, seconds: float) -> str:
        """Says how many of the runs should fit into the seconds that are left."""
        to_do = [task for task in self.cheapest_first() if task.command]
        if to_do and not self.seconds_per_round:
            runs = pluralize(len(to_do), "run")
            return f"budget {self.hours:g} h: no cell has run yet, so that it is not known how many of {runs} fit"
        fitting, used = 0, 0.0
        for task in to_do:
            used += self.seconds(task) / self.jobs
            fitting += used <= seconds
        runs = f"{fitting} of {pluralize(len(to_do), 'run')} should fit"
        return f"budget {self.hours:g} h: {runs}; they need {self.needed(to_do)}"

    def needed(self, tasks: Sequence[CellTask]) -> str:
        """Says how many hours the runs need together."""
        finite = [seconds for task in tasks if (seconds := self.seconds(task)) < inf]
        unknown = len(tasks) - len(finite)
        more = f", and {pluralize(unknown, 'run')} of unknown length" if unknown else ""
        return f"about {sum(finite) / self.jobs / 3600:.2f} h{more}"


def config_without_seed(task: CellTask) -> str:
    """The configuration of a run as JSON, its seed left out."""
    return json.dumps({**task.cell.raw, "seed": None}, sort_keys=True)


def seconds_per_round(tasks: Sequence[CellTask], out: Path) -> dict[str, float]:
    """Median seconds of a round of the cells that have run, by `config_without_seed`; the first round warms up."""
    by_configuration: dict[str, list[float]] = {}
    for task in tasks:
        if task.done > 1:
            lines = metrics_file.read(task.cell.run(out))[1 : task.done]
            seconds = [float(line["seconds"]) for line in lines if line["seconds"]]  # a lost round has none
            by_configuration.setdefault(config_without_seed(task), []).extend(seconds)
    return {key: median(seconds) for key, seconds in by_configuration.items() if seconds}


def work_per_round(tasks: Sequence[tuple[CellTask, Config]], update: Callable[[int, int], None]) -> dict[str, float]:
    """Counts steps x parameters of a round by `config_without_seed`; nothing is trained."""
    configs: dict[str, Config] = {}  # of the first seed, which stands for the others
    for task, config in tasks:
        configs.setdefault(config_without_seed(task), config)
    work: dict[str, float] = {}
    for number, (key, config) in enumerate(configs.items()):
        update(number, len(configs))
        logging.disable(logging.WARNING)  # the run itself will warn
        try:
            work[key] = _count_work(config)
        except UserError:
            continue  # the run itself will say why
        finally:
            logging.disable(logging.NOTSET)
    return work


def _count_work(config: Config) -> float:
    experiment, training = prepare(config, HOST), config.training
    samples, n = experiment.federation.num_train, experiment.federation.num_clients
    steps = np.array([training.num_steps(int(count)) for count in samples])
    parameters = np.array([sum(leaf.numel() for _, leaf in tree.leaves(task.like())) for task in experiment.tasks])
    share = training.num_drawn(n) / n
    return float(share * (steps[:n] * parameters[experiment.cohort[:n]]).sum())

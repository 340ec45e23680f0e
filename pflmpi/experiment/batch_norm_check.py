"""Whether a client would train batch norm on a batch of one sample, found before the rounds."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import Task
from pflmpi.learning.training import Pass, count_samples

Case = tuple[int, tuple[str, ...]]  # a cohort, and the passes in which its clients have a batch of one sample


def check_single_samples(
    config: Config,
    tasks: Sequence[Task],
    cohort: np.ndarray,
    participation: Participation,
    done: int,
    fails: Callable[[Case, int], bool],
) -> None:
    """Raise `ConfigError` for a client that cannot be trained after round `done`, as a batch has one sample.

    Only what is sure is refused: the client takes part, no deadline cuts its batches off, no error is skipped, and its
    update fails in a trial.

    Args:
        cohort: [N] the cohort of each client.
        fails: whether an update in a round fails with batches of one sample, and not with two.
    """
    training, passes = config.training, _passes(config, tasks, done + 1)
    if training.deadline is not None or config.runtime.client_errors == "skip":
        return
    cases = _list_cases(tasks, cohort, participation.num_train, passes)
    untried = np.array([len(names) > 0 for _, names in cases])
    last = training.rounds if training.stop is None else min(done + 1, training.rounds)
    for round in range(done + 1, last + 1):
        if not untried.any():
            return
        if _passes(config, tasks, round) != passes:
            continue
        participants = participation.participants(round)
        while len(clients := participants[untried[participants]]):
            number, names = cases[clients[0]]
            if fails((number, names), round):
                raise ConfigError(
                    f"client {clients[0]} trains on a batch of one sample in round {round}, of which batch norm of "
                    f"model {tasks[number].architecture.name} has no variance (pass {names[0]!r}, "
                    f"{participation.num_train[clients[0]]} training samples, batches of {training.batch_size}); "
                    "choose another training.batch_size or training.micro_batch, or training.drop_last: true (for a "
                    "run that has begun by `pflmpi fork`), or for a module of a new run model.norm: group"
                )
            untried &= np.array([case != (number, names) for case in cases])


def _passes(config: Config, tasks: Sequence[Task], round: int) -> list[dict[str, Pass]]:
    """The passes of a round, by cohort."""
    return [dict(config.algorithm.passes(task, round)) for task in tasks]


def _list_cases(
    tasks: Sequence[Task], cohort: np.ndarray, num_train: np.ndarray, passes: Sequence[Mapping[str, Pass]]
) -> list[Case]:
    """What to try for each client; without passes where batch norm certainly gets no batch of one sample."""
    kinds = [*zip(cohort.tolist(), num_train.tolist(), strict=True)]
    names = {
        (number, count): tuple(
            name
            for name, length in passes[number].items()
            if tasks[number].architecture.has_batch_norm
            and tasks[number].training.has_single_sample(count_samples(count, length), length)
        )
        for number, count in dict.fromkeys(kinds)
    }
    return [(kind[0], names[kind]) for kind in kinds]

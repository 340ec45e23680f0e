"""Whether the checkpoints of a run are whole."""

from pathlib import Path

from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5
from pflmpi.store.layout import Layout
from pflmpi.store.names import round_path, rounds
from pflmpi.store.reading import read_layout
from pflmpi.store.shard import rows_problem


def verify(run: Path, round: int) -> list[str]:
    """Return what is wrong with a round, one line each; empty when it is good. Every byte of it is read."""
    path = round_path(run, round)
    if problem := checked_hdf5.damage(path):
        return [problem]
    try:
        layout = read_layout(run, round)
    except CheckpointError as error:
        return [str(error)]
    return _shard_problems(run, layout)


def newest_good(run: Path) -> tuple[int, list[str]]:
    """Return the newest round without problems, and the problems of the newer ones that were passed over.

    Raises:
        CheckpointError: the folder is no run, or has no good round.
    """
    if not run.is_dir():
        raise CheckpointError(f"{run} is no folder; name the folder that `pflmpi run` printed")
    there = rounds(run)
    if not there:
        found = ", ".join(sorted(path.name for path in run.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{run} has no checkpoint: it holds {found}, and no round_00000.h5 or later; name the folder that "
            "`pflmpi run` printed, or start again with `pflmpi run`"
        )
    passed_over: list[str] = []
    for round in reversed(there):
        problems = verify(run, round)
        if not problems:
            return round, passed_over
        passed_over += problems
    raise CheckpointError(
        f"{run} has no good checkpoint among {len(there)}: {'; '.join(dict.fromkeys(passed_over))}; put the files back "
        "from a copy, or start again with `pflmpi run`"
    )


def _shard_problems(run: Path, layout: Layout) -> list[str]:
    bad = {name: problem for name in layout.files if (problem := checked_hdf5.damage(run / name))}
    for cohort in sorted(layout.cohorts):
        for name, clients in layout.shards(cohort):
            if name not in bad and (problem := rows_problem(run / name, cohort, clients, layout.row[clients])):
                bad[name] = problem
    return [bad[name] for name in sorted(bad)]

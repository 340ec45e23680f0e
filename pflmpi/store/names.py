"""Names of the files of a run and of the cohorts in them."""

import re
from pathlib import Path

SHARDS = "shards"

_ROUND = re.compile(r"round_([0-9]{5,})\.h5")
_SHARD = re.compile(r"round_([0-9]{5,})_rank_([0-9]{3,})\.h5")
SHARD_NAME = re.compile(rf"{SHARDS}/{_SHARD.pattern}")  # relative to the run folder


def round_path(run: Path, round: int) -> Path:
    """Returns the path of a round file.

    >>> round_path(Path("run"), 12).name
    'round_00012.h5'
    """
    return run / f"round_{round:05d}.h5"


def shard_name(round: int, rank: int) -> str:
    """Returns the name of a shard relative to the run folder.

    >>> shard_name(12, 3)
    'shards/round_00012_rank_003.h5'
    """
    return f"{SHARDS}/round_{round:05d}_rank_{rank:03d}.h5"


def shard_path(run: Path, round: int, rank: int) -> Path:
    return run / shard_name(round, rank)


def round_of(name: str) -> int | None:
    """Returns the round in the name of a round file or shard; None for any other name.

    >>> round_of("round_00012.h5"), round_of("round_00012_rank_003.h5"), round_of("notes.h5")
    (12, 12, None)
    """
    match = _ROUND.fullmatch(name) or _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def rounds(run: Path) -> list[int]:
    """Lists the rounds that have a file, ascending, without checking whether it is intact."""
    if not run.is_dir():
        return []
    return sorted(int(match[1]) for path in run.iterdir() if (match := _ROUND.fullmatch(path.name)))


def cohort_name(number: int) -> str:
    return f"cohort{number}"

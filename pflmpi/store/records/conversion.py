"""Turning records into shards and round files."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from pflmpi import atomic
from pflmpi.errors import RunError
from pflmpi.regular_file import check_folder
from pflmpi.store.checked_hdf5 import Checksum
from pflmpi.store.names import round_of, rounds
from pflmpi.store.pruning import prune
from pflmpi.store.records import content
from pflmpi.store.records.content import Checkpoint
from pflmpi.store.records.record import Record
from pflmpi.store.records.segments import any_there, clear, exclusive, recorded, segments
from pflmpi.store.round_file import write_round
from pflmpi.store.shard import write_shard
from pflmpi.text import for_shell


def convert(run: Path, check: Callable[[], None] = lambda: None) -> None:
    """Turn the complete checkpoints that are recorded into HDF5, and delete records that are not needed any more.

    Of many, only as many are as the run keeps. Checkpoints that are not complete, because a rank was killed or has not
    come to it yet, stay as they are.

    Args:
        check: raises when the run belongs to another process by now; called before anything is written.

    Raises:
        OSError: a file could not be written; what was complete stays so.
        CheckpointError: a shard of an earlier round is missing or damaged.
        RunError: another process does the same, and does not come to an end.
    """
    if not any_there(run):
        return
    with exclusive(run):
        there = _Recorded(run)
        for round in there.due():
            check()
            there.write(round)
        there.drop()


def pending(run: Path) -> list[int]:
    """The checkpoints that are recorded, complete, and not yet HDF5, ascending; changes nothing."""
    return _Recorded(run).complete() if any_there(run) else []


def finish(run: Path, last: int | None) -> None:
    """Delete the records of a run that has converted them all.

    Args:
        last: the round recorded last; None if none was.

    Raises:
        RunError: it did not become HDF5, or a file could not be deleted.
    """
    if last is not None and last not in rounds(run):
        raise RunError(
            f"round {last} of {run} is recorded, but files that it needs were moved or deleted; put them back, and "
            f"`pflmpi resume {for_shell(run)}`"
        )
    try:
        clear(run)
    except OSError as error:
        raise RunError(explained(run, error)) from error


def explained(run: Path, error: OSError) -> str:
    """What happened while a checkpoint was written, what is there, and what to do."""
    what = error.strerror or str(error)
    present = rounds(run)
    with contextlib.suppress(OSError):  # what the error was about may hold for reading, too
        present += pending(run)
    last = f"the last complete round is {present[-1]}" if present else "no round is complete yet"
    again = f"`pflmpi resume {for_shell(run)}`" if present else "start again"
    return f"{what} while writing {error.filename or run}; {last}; {atomic.remedy(error)} and {again}"


class _Described(NamedTuple):
    """What a checkpoint needs besides the record of rank 0, and how many the run keeps.

    Attributes:
        files: names of the shards that it needs.
        ranks: whose records hold the rows of a shard of its round, by name.
        keep: checkpoints that the run keeps; 0 for all.
    """

    files: tuple[str, ...]
    ranks: Mapping[str, Sequence[int]]
    keep: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "_Described":
        return cls(checkpoint.layout.files, checkpoint.ranks, checkpoint.keep)


class _Recorded:
    """The records of a run at one moment."""

    def __init__(self, run: Path) -> None:
        newest = max(rounds(run), default=-1)
        self._waiting = [round for round in recorded(run) if round > newest]
        self._run, self._segments = run, segments(run) if self._waiting else []
        self._places = {(one.rank, place.round): (one, place) for one in self._segments for place in one.places}
        self._whole: dict[tuple[int, int], bool] = {}  # whether the record of a rank and round is undamaged
        self._described: dict[int, _Described | None] = {}
        self._checksums: Mapping[str, Checksum] = {}
        self._files: dict[int, tuple[str, ...]] = {}  # the shards that a round needs

    def due(self) -> list[int]:
        """The complete rounds that the run keeps, ascending."""
        keep = next((found.keep for round in reversed(self._waiting) if (found := self._about(round))), 0)
        return self.complete(keep or None)

    def complete(self, most: int | None = None) -> list[int]:
        """The newest rounds, ascending, whose records and shards are all there; all by default."""
        there = (
            round
            for round in reversed(self._waiting)
            if (found := self._about(round)) and all(self._has(name) for name in found.files)
        )
        return list(islice(there, most))[::-1]

    def write(self, round: int) -> None:
        """Write the shards that a complete round needs and that are not there, its round file, and delete old ones."""
        record = self._read(0, round)
        assert record is not None, round
        checkpoint = content.checkpoint_of(record)
        for name in checkpoint.layout.files:
            if not (self._run / name).exists():
                check_folder((self._run / name).parent)
                self._write_shard(name, checkpoint.attributes["run"])
        described = checkpoint.layout, checkpoint.templates, checkpoint.attributes
        self._checksums = write_round(self._run, checkpoint.content, *described, self._checksums)
        self._files[round] = checkpoint.layout.files
        prune(self._run, checkpoint.keep, joined=self._files)

    def drop(self) -> None:
        """Delete the files whose records are of no use any more; the last one of each rank may be continued."""
        newest = max(rounds(self._run), default=-1)
        for one, after in pairwise(self._segments):
            if one.rank == after.rank and all(place.round <= newest for place in one.places):
                one.path.unlink(missing_ok=True)

    def _has(self, name: str) -> bool:
        """Whether a shard is there, or all records that it is made of are."""
        if (self._run / name).exists():
            return True
        keys = self._keys(name)
        return bool(keys) and all(self._is_whole(*key) for key in keys)

    def _is_whole(self, rank: int, round: int) -> bool:
        if (rank, round) not in self._whole:
            self._whole[rank, round] = self._read(rank, round) is not None
        return self._whole[rank, round]

    def _keys(self, name: str) -> list[tuple[int, int]]:
        """Rank and round of the records that hold the rows of a shard; none where they are lost."""
        round = round_of(Path(name).name)
        assert round is not None, name
        found = self._about(round)
        return [(rank, round) for rank in found.ranks.get(name, ())] if found else []

    def _write_shard(self, name: str, run_id: str | int) -> None:
        keys = self._keys(name)
        records = [record for key in keys if (record := self._read(*key)) is not None]
        assert len(records) == len(keys) > 0, f"{name} is not complete"
        rows = content.merged([content.rows_of(record) for record in records])
        write_shard(self._run / name, rows, {"run": run_id, "round": keys[0][1], "rank": keys[0][0]})

    def _about(self, round: int) -> _Described | None:
        """What the record of rank 0 says; None where it is damaged or gone. It is large, and read once for this."""
        if round not in self._described:
            record = self._read(0, round)
            self._whole[0, round] = record is not None
            self._described[round] = None if record is None else _Described.of(content.checkpoint_of(record))
        return self._described[round]

    def _read(self, rank: int, round: int) -> Record | None:
        found = self._places.get((rank, round))
        return None if found is None else found[0].read(found[1])

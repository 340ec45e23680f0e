"""Where the newest row of each client is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pflmpi.store import checked_hdf5
from pflmpi.store.hdf5 import File
from pflmpi.store.names import SHARD_NAME, cohort_name, shard_name

NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the newest row of each client is stored.

    Attributes:
        cohorts: for each cohort the ascending ids of its clients, int64.
        file: [N] int64, index into `files`; -1 for a client without a row.
        row: [N] int64, the row in that file, counted within the client's cohort; -1 for a client without a row.
        files: names of the shards that hold any newest row, relative to the run folder, sorted.
    """

    cohorts: Mapping[str, np.ndarray]
    file: np.ndarray
    row: np.ndarray
    files: tuple[str, ...]

    @classmethod
    def unwritten(cls, cohort_of: np.ndarray) -> "Layout":
        """Returns the layout before anything is written; `cohort_of` [N] is the number of each client's cohort."""
        nowhere = np.full(len(cohort_of), NOWHERE, np.int64)
        return cls(_group_by_cohort(cohort_of), nowhere, nowhere.copy(), ())

    def updated(self, round: int, rank_clients: Sequence[np.ndarray], cohort_of: np.ndarray) -> "Layout":
        """Returns the layout after each rank has written a shard with its changed clients.

        The rows of a shard are numbered within each cohort, in ascending order of the clients.

        Args:
            rank_clients: for each rank, the ids that changed; a rank without any writes no shard.
            cohort_of: [N] the number of each client's cohort.

        >>> cohort_of = np.array([0, 0, 1])
        >>> layout = Layout.unwritten(cohort_of).updated(1, [np.array([0, 2]), np.array([1])], cohort_of)
        >>> layout.files, layout.file.tolist(), layout.row.tolist()
        (('shards/round_00001_rank_000.h5', 'shards/round_00001_rank_001.h5'), [0, 1, 0], [0, 0, 0])
        """
        cohort_of = np.asarray(cohort_of)
        all_changed = np.concatenate([np.empty(0, np.int64), *rank_clients])
        assert len(all_changed) == len(np.unique(all_changed)), "a client changed on two ranks"
        file, row, files = self.file.copy(), self.row.copy(), list(self.files)
        for rank, clients in enumerate(rank_clients):
            if not len(clients):
                continue
            name = shard_name(round, rank)
            assert name not in files, f"{name} is in use"
            file[clients] = len(files)
            files.append(name)
            for number in np.unique(cohort_of[clients]):
                changed = np.sort(clients[cohort_of[clients] == number])
                row[changed] = np.arange(len(changed))
        return _drop_unused_files(_group_by_cohort(cohort_of), file, row, files)

    def shards(self, cohort: str, clients: np.ndarray | None = None) -> list[tuple[str, np.ndarray]]:
        """Lists the shards with rows of a cohort, each with the ascending ids [m] whose rows it holds.

        Args:
            clients: limits the ids to these.
        """
        members = self.cohorts[cohort]
        if clients is not None:
            clients = np.unique(clients)
            positions = np.searchsorted(members, clients)  # not `intersect1d`, which sorts all members
            members = clients[np.append(members, NOWHERE)[positions] == clients]
        stored = members[self.file[members] != NOWHERE]
        by_file = stored[np.argsort(self.file[stored], kind="stable")]
        indices, starts = np.unique(self.file[by_file], return_index=True)
        ends = [*starts[1:], len(by_file)]
        return [
            (self.files[index], by_file[start:end]) for index, start, end in zip(indices, starts, ends, strict=False)
        ]


def arrays(layout: Layout) -> dict[str, np.ndarray]:
    """Returns the arrays that store a layout, by name, besides the names of its cohorts and files."""
    cohort = np.zeros(len(layout.file), np.int64)
    for number, clients in enumerate(layout.cohorts.values()):
        cohort[clients] = number
    return {"file": layout.file, "row": layout.row, "cohort": cohort}


def read_layout(file: File) -> Layout:
    """Read the layout in a round file and verify its checksums.

    Raises:
        CheckpointError: it is damaged.
        ValueError: it is not what pflmpi writes.
    """
    about = checked_hdf5.read_about(file)
    files, names = check_shard_names(about["shards"]), list(about["cohorts"])
    file_of, row, cohort = (checked_hdf5.read_dataset(file, f"layout/{name}") for name in ("file", "row", "cohort"))
    has_cohorts = file_of.shape == row.shape == cohort.shape and ((cohort >= 0) & (cohort < len(names))).all()
    if not (has_cohorts and ((file_of >= NOWHERE) & (file_of < len(files)) & (row >= NOWHERE)).all()):
        raise ValueError("its layout names clients, files or rows that are not there")
    cohorts = {str(name): np.flatnonzero(cohort == number) for number, name in enumerate(names)}
    return Layout(cohorts, file_of, row, files)


def check_shard_names(shards: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names of shards; raises `ValueError` for any other name, which could lead out of the run."""
    for name in shards:
        if not SHARD_NAME.fullmatch(name):
            raise ValueError(f"its layout names {name!r}, which is no shard")
    return tuple(shards)


def _group_by_cohort(cohort_of: np.ndarray) -> dict[str, np.ndarray]:
    numbers = np.asarray(cohort_of)
    return {
        cohort_name(int(number)): np.flatnonzero(numbers == number).astype(np.int64) for number in np.unique(numbers)
    }


def _drop_unused_files(
    cohorts: Mapping[str, np.ndarray], file: np.ndarray, row: np.ndarray, files: Sequence[str]
) -> Layout:
    """Returns a layout with its files sorted, without those that hold no newest row."""
    used = sorted(np.unique(file[file != NOWHERE]).tolist(), key=files.__getitem__)
    new = np.full(len(files) + 1, NOWHERE, np.int64)  # the last entry stands for index -1
    new[used] = np.arange(len(used))
    return Layout(cohorts, new[file], row, tuple(files[index] for index in used))

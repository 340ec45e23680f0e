"""Several runs as one table."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from glob import glob
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from pflmpi.analysis.comparable import decisive_options
from pflmpi.analysis.run import Run, needed, open_run
from pflmpi.config.argument_checks import wrong_type
from pflmpi.errors import CheckpointError
from pflmpi.machine import expanded
from pflmpi.store import config_file
from pflmpi.store.names import SHARDS
from pflmpi.text import join_truncated, printable

if TYPE_CHECKING:
    from pflmpi.analysis.figures import Figures

_log = logging.getLogger(__name__)
_SET_ASIDE = re.compile(r"old-.+-\d+")  # by `sweep`, with the time
_ALWAYS = ("algorithm.name", "data.name", "seed")


class Runs(tuple[Run, ...]):
    """Runs in the order of their folders. Made by `open_runs`."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Runs": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "Run | Runs":
        return Runs(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def frame(self) -> Any:
        """One pandas.DataFrame with a line for each run and round.

        Its columns are `run` (the folder), the algorithm, the dataset and the seed, every other key of the
        configurations that results depend on and that is not the same in all runs, and then those of metrics.csv.

        Raises:
            UserError: pandas is not installed.
            CheckpointError: a metrics file is damaged.
        """
        return self._beside_options([run.frame() for run in self])

    def clients_table(self) -> Any:
        """One pandas.DataFrame with a line for each run, client and round that has a checkpoint.

        Its first columns are those of `frame`, and then those of `Run.clients_table`; raises as these.
        """
        return self._beside_options([run.clients_table() for run in self])

    def _beside_options(self, tables: Sequence[Any]) -> Any:
        """The tables of all runs as one, with the folder and the options in which the runs differ before theirs."""
        import pandas

        options = [dict(_flatten(decisive_options(run))) for run in self]
        first = options[0] if options else {}
        keys = [key for key in sorted(set().union(*options)) if any(run.get(key) != first.get(key) for run in options)]
        columns: dict[str, list[Any]] = {"run": [str(run.path) for run in self]}
        columns |= {key: [run.get(key) for run in options] for key in dict.fromkeys([*_ALWAYS, *keys])}
        places = [place for place, table in enumerate(tables) for _ in range(len(table))]
        about = pandas.DataFrame(columns).iloc[places].reset_index(drop=True)
        whole = pandas.concat(
            [table for table in tables if len(table)] or tables[:1] or [pandas.DataFrame()], ignore_index=True
        )
        return pandas.concat([about, whole], axis=1)

    def summary(self, *targets: float) -> Any:
        """One pandas.DataFrame with what a report says of the runs: a line for each, or for those of several seeds.

        Runs that differ in the seed alone are one line: their number is `seeds`, the values are means, and their
        standard deviations over the seeds are in columns whose names end with " ±".

        Args:
            targets: accuracies, as shares, until which rounds, seconds and bytes are counted.

        Raises:
            UserError: pandas is not installed.
        """
        from pflmpi.analysis.selection import named
        from pflmpi.analysis.summary import over_seeds, summarize_runs

        runs = named(self)
        lines = over_seeds(runs, summarize_runs(runs, targets))
        return needed("pandas", "summary()", "pandas").DataFrame(lines).replace("", None)

    @property
    def figures(self) -> "Figures":
        """The figures that compare these runs, as Altair charts, such as `runs.figures.accuracy()`."""
        from pflmpi.analysis.figures import Figures

        return Figures(self)

    def __repr__(self) -> str:
        return f"Runs({len(self)}: {', '.join(sorted({run.name for run in self}))})"


def open_runs(paths: "str | PathLike[str] | Iterable[str | PathLike[str]]") -> Runs:
    """The runs of a pattern such as `"runs/*"`, or in folders; what a pattern finds beside runs is left out.

    Raises:
        CheckpointError: there is none, or a folder that was named is no run.
    """
    if isinstance(paths, str | PathLike):
        runs = [open_run(path) for path in map(Path, sorted(glob(str(expanded(paths))))) if is_run(path)]
        if not runs:
            raise CheckpointError(f"{paths} matches no run; give a pattern of their folders, such as runs/*")
        return Runs(runs)
    if not isinstance(paths, Iterable):
        raise wrong_type("paths", paths, "a pattern such as 'runs/*', or a list of folders")
    return Runs([open_run(path) for path in paths])


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run, whole or not."""
    return config_file.path(folder).exists() or (folder / SHARDS).is_dir()


def runs_in(folder: Path) -> list[Path]:
    """The folder if it is that of a run, otherwise the runs at any depth below it, sorted.

    Runs that a sweep has set aside are left out. A link to a run stands for it; one to another folder, which may lead
    in circles, is not followed, and a warning names it.
    """
    if is_run(folder):
        return [folder]
    runs, links = list[Path](), list[str]()
    for parent, names, _ in os.walk(folder):
        below = [Path(parent, name) for name in names if not _SET_ASIDE.fullmatch(name)]
        inside = [path for path in below if is_run(path)]
        runs += inside
        links += [str(path) for path in below if path.is_symlink() and path not in inside]
        names[:] = [path.name for path in below if path not in inside]
    if links:
        _log.warning(
            "links to folders that are no runs are not followed: %s; name these too",
            printable(join_truncated(links, 8)),
        )
    return sorted(runs)


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""Several runs, opened together."""

from collections.abc import Iterable, Iterator, Sequence
from glob import escape, glob
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from pflmpi.analysis.comparable import collect_decisive_options
from pflmpi.analysis.run import Run, open_run
from pflmpi.config.argument_checks import wrong_type
from pflmpi.errors import CheckpointError
from pflmpi.machine import expand_path
from pflmpi.store.runs import is_run

if TYPE_CHECKING:
    from pflmpi.analysis.figures import Figures

_ALWAYS = ("algorithm.name", "data.name", "seed")  # options that tables always show


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

        Its columns are `run` (the folder), the algorithm, the dataset, the seed, every other option that affects
        results and differs between the runs, and then those of metrics.csv.

        Raises:
            CheckpointError: a metrics file is damaged.
        """
        return self._concat([run.frame() for run in self])

    def clients_table(self) -> Any:
        """One pandas.DataFrame with a line for each run, client and round that has a checkpoint.

        Its columns are the options of `frame`, then the columns of `Run.clients_table`. Runs without a checkpoint have
        no line.

        Raises:
            CheckpointError: a file is damaged.
        """
        import pandas

        return self._concat([run.clients_table() if run.rounds else pandas.DataFrame() for run in self])

    def _concat(self, tables: Sequence[Any]) -> Any:
        """Joins a table of each run into one, with the folder and the differing options as first columns."""
        import pandas

        options = [dict(_flatten(collect_decisive_options(run))) for run in self]
        first = options[0] if options else {}
        keys = [key for key in sorted(set().union(*options)) if any(run.get(key) != first.get(key) for run in options)]
        columns: dict[str, list[Any]] = {"run": [run.shown_path for run in self]}
        columns |= {key: [run.get(key) for run in options] for key in dict.fromkeys([*_ALWAYS, *keys])}
        run_of_line = [place for place, table in enumerate(tables) for _ in range(len(table))]
        left = pandas.DataFrame(columns).iloc[run_of_line].reset_index(drop=True)
        # pandas warns about empty tables among others, whose columns have no dtype
        filled = [table for table in tables if len(table)] or tables[:1] or [pandas.DataFrame()]
        return pandas.concat([left, pandas.concat(filled, ignore_index=True)], axis=1)

    def summary(self, *targets: float) -> Any:
        """The table of runs of a report as a pandas.DataFrame.

        Runs that differ only in the seed are one line: `seeds` is their number, values are means, and columns whose
        names end with " ±" are standard deviations over the seeds.

        Args:
            targets: accuracies, as shares; the table has rounds, seconds and bytes to reach each.
        """
        import pandas

        from pflmpi.analysis.selection import name_runs
        from pflmpi.analysis.summary import average_seeds, by_title, summarize_runs

        runs = name_runs(self)
        lines = average_seeds(runs, summarize_runs(runs, targets))
        return pandas.DataFrame(map(by_title, lines)).replace("", None)

    @property
    def figures(self) -> "Figures":
        """The figures that compare these runs, as Altair charts, such as `runs.figures.accuracy()`."""
        from pflmpi.analysis.figures import Figures

        return Figures(self)

    def __repr__(self) -> str:
        return f"Runs({len(self)}: {', '.join(sorted({run.name for run in self}))})"


def open_runs(paths: "str | PathLike[str] | Iterable[str | PathLike[str]]") -> Runs:
    """Opens the runs that match a pattern such as `"runs/*"`, or a list of folders.

    Folders that match the pattern but are no runs are left out. A folder of that very name is taken alone.

    Raises:
        CheckpointError: no run matches, or a folder in the list is no run.
    """
    if isinstance(paths, str | PathLike):
        pattern = str(expand_path(paths))
        matches = glob(escape(pattern)) or sorted(glob(pattern))
        runs = [open_run(path) for path in map(Path, matches) if is_run(path)]
        if not runs:
            raise CheckpointError(f"{paths} matches no run; give a pattern of their folders, such as runs/*")
        return Runs(runs)
    if not isinstance(paths, Iterable):
        raise wrong_type("paths", paths, "a pattern such as 'runs/*', or a list of folders")
    return Runs([open_run(path) for path in paths])


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings with dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

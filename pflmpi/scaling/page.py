"""The page over scaling experiments: tables, figures, and where it was measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pflmpi.analysis.drawing import html
from pflmpi.analysis.drawing.html import PageTable, Section, draw_figures
from pflmpi.analysis.drawing.rendering import PICTURES
from pflmpi.analysis.table import tabular
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.scaling.environment import hardware
from pflmpi.scaling.experiment import WARM_UP
from pflmpi.scaling.extrapolation import EXTRAPOLATION, extrapolations
from pflmpi.scaling.figures import figures
from pflmpi.scaling.results import Results
from pflmpi.scaling.tables import TITLES, readable

PAGE, _TABLE, _FIGURES = "scale.html", "scale.tex", "figures"


def write_page(
    among: Sequence[Results], out: Path, to: int | None, update: Callable[[int, int], None] = lambda *_: None
) -> list[str]:
    """Write the page with its figures and its LaTeX table into a folder; what is wrong with the experiments.

    Args:
        to: ranks up to which the fitted serial fraction is drawn; None for none.
        update: called with how many figures are drawn, of how many.

    Raises:
        CheckpointError: nothing was measured in one of them.
        ConfigError: the folder cannot be written, or no model can be fitted.
    """
    named = _by_name(among)
    for found in among:
        if not found.measured:
            raise CheckpointError(
                f"nothing was measured in {found.out} yet{''.join(f'; {why}' for why in found.problems)}"
            )
    models = [] if to is None else extrapolations(named, to)
    problems = [f"{name}: {problem}" for name, found in named.items() for problem in found.problems]
    try:
        for path in (out / _FIGURES).glob(f"{EXTRAPOLATION}*"):  # of an earlier page
            path.unlink()
        drawn = draw_figures(out, PICTURES, [*figures(named), *models], _FIGURES, update)
        tables = [_table(name, found) for name, found in named.items()]
        title = f"Scaling of {next(iter(named))}" if len(named) == 1 else f"Scaling: {', '.join(named)}"
        about = "Rounds of one configuration on several numbers of ranks; the first round of each run is left out."
        sections = [
            *tables,
            Section("All figures", figures=drawn),
            Section("Where it was measured", tables=[_places(named)]),
        ]
        (out / PAGE).write_text(html.page(title, about, problems, sections), encoding="utf-8")
        latex = [line for name, found in named.items() for line in (f"% {name}", *tabular(*readable(found)), "")]
        (out / _TABLE).write_text("\n".join(latex), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the page in {out}: {error.strerror}; choose another --out") from error
    return problems


def _by_name(among: Sequence[Results]) -> dict[str, Results]:
    """The experiments by the names of their folders, or by their paths where these are not different."""
    names = [found.out.resolve().name for found in among]
    if len(set(names)) < len(names):
        names = [str(found.out) for found in among]
    return dict(zip(names, among, strict=True))


def _table(name: str, found: Results) -> Section:
    columns, rows = readable(found)
    wrong = [number for number, point in enumerate(found.points) if not point.same_bits or any(point.problems.values())]
    scaling = found.scaling
    parts = [scaling.config[section].get("name", "") for section in ("algorithm", "data")]
    text = (
        f"{scaling.mode}: {TITLES[scaling.mode]}; {' on '.join(parts)}; {scaling.repeats} runs each, medians of "
        f"{scaling.rounds - WARM_UP} rounds; seconds per round and bytes. A point with other bits, or a run that "
        "failed, stands out."
    )
    return Section(name, text, tables=[PageTable(columns, rows, wrong=wrong)])


def _places(named: dict[str, Results]) -> PageTable:
    columns = ["experiment", "ranks", "hardware", "nodes", "device", "driver", "transport", "pflmpi", "commit", "torch"]
    columns += ["numpy", "mpi4py"]
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, found in named.items():
        for point in found.measured:
            for run in point.runs:
                known = run.record
                key = (name, hardware(known), *(str(known.get(column, "")) for column in columns[3:]))
                rows.setdefault(key, []).append(point.ranks)
    listed = [[key[0], ", ".join(str(rank) for rank in dict.fromkeys(ranks)), *key[1:]] for key, ranks in rows.items()]
    return PageTable(columns, listed, names=3)

"""A report over some runs, written to a folder: the page, its figures and their tables."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pflmpi import atomic
from pflmpi.analysis import figures, summary
from pflmpi.analysis.comparable import main_measure, open_comparable_runs, seed_groups, unlike_lengths, yaml_text
from pflmpi.analysis.drawing import html
from pflmpi.analysis.drawing.html import PageFigure, PageTable, Section, draw_figures
from pflmpi.analysis.figures import Plots
from pflmpi.analysis.plots import Missing
from pflmpi.analysis.selection import NamedRun, SeedGroup, named
from pflmpi.analysis.series.clients import describe_gains, plot_single_clients
from pflmpi.analysis.summary import Line, Value
from pflmpi.config.sections import by_key
from pflmpi.errors import CheckpointError
from pflmpi.store import job_file
from pflmpi.text import format_csv, join_truncated

PAGE, _FIGURES = "report.html", "figures"
_LINK = re.compile(rf'href="({_FIGURES}/[^"]+)"')


def write_report(
    paths: Sequence[Path],
    out: Path,
    update: Callable[[int, int], None],
    targets: Sequence[float] = (),
    pictures: Sequence[str] = (),
    reload: int = 0,
    made: str = "",
    whole: bool = False,
) -> list[str]:
    """Write the report to a folder; return what could not be read or compared, and was left out.

    Args:
        update: called with how many steps are done, of how many.
        targets: accuracies, as shares, until which the cost is shown; by default those of `choose_targets`.
        pictures, whole: see `draw_figures`.
        reload, made: see `html.build_page`.

    Raises:
        CheckpointError: none of the runs can be read.
        ConfigError: the folder cannot be written.
    """
    done = 0
    total = len(paths)

    def step() -> None:
        nonlocal done
        done += 1
        update(done, total)

    readable_runs, problems = open_comparable_runs(paths, step)
    if not readable_runs:
        raise CheckpointError("; ".join(problems))
    runs = named(readable_runs)
    groups = seed_groups(runs)
    total += len(groups[: figures.MOST_DETAILED])
    with atomic.refusing(f"the report in {out}", "choose another --out"):
        (out / _FIGURES).mkdir(parents=True, exist_ok=True)
        former = (out / PAGE).read_text("utf-8", "replace") if (out / PAGE).exists() else ""
        lines = summary.summarize_runs(runs, targets or summary.choose_targets(readable_runs))
        table = [list(lines[0]), *(list(summary.format_line(line).values()) for line in lines)]
        (out / "runs.csv").write_text(format_csv(table), encoding="utf-8")
        details = []
        for group in groups[: figures.MOST_DETAILED]:
            plots, unread = figures.make_run_figures(group.runs[0])
            details.append(plots)
            problems += unread
            step()
        sections = _build_sections(runs, groups, lines, details, partial(draw_figures, out, pictures, whole=whole))
        title = f"{runs[0].label}: report" if len(runs) == 1 else f"{len(runs)} runs: report"
        text = html.build_page(title, _describe_data(runs), problems, sections, made, reload)
        atomic.write(out / PAGE, text.encode())  # a browser that reloads sees a whole page
        _delete_files(out, _find_linked_files(former) - _find_linked_files(text))
    return problems


def _build_sections(
    runs: Sequence[NamedRun],
    groups: Sequence[SeedGroup],
    lines: Sequence[Line],
    details: Sequence[Plots],
    draw: Callable[[Plots, str], list[PageFigure | Missing]],
) -> list[Section]:
    """The sections of the page: the runs and an overview, then one to open for each question and each run.

    Args:
        lines: of the table of runs.
        details: the figures of the first run of each of the first groups.
        draw: draws figures into a folder.
    """
    lengths = [f"{line}." for line in unlike_lengths(groups)]
    text = " ".join([*(text for run in runs for text in _describe_run(run, runs)), *lengths, describe_gains(runs)])
    measure = main_measure([named_run.run for named_run in runs])
    table = build_runs_table(summary.over_seeds(runs, lines), measure.lower)
    sections = [Section("Runs", text, table, [("What the columns are", summary.describe_columns(measure))])]
    firsts = [group.runs[0] for group in groups[: len(details)]]
    multiples, rest = figures.make_multiples([(run.label, plots) for run, plots in zip(firsts, details, strict=True)])
    questions = {**figures.make_comparison_figures(runs, groups), "Clients and layers over rounds": multiples}
    for place, (title, plots) in enumerate(questions.items()):
        if plots:
            sections.append(Section(title, figures=draw(plots, _FIGURES), closed=place > 0))
    if of_clients := draw(plot_single_clients(firsts, details), _FIGURES):
        sections.append(Section("Single clients", figures=of_clients, kind="client", closed=True))
    singles = []
    for number, (group, plots) in enumerate(zip(groups, rest, strict=False), 1):
        run, seeds = group.runs[0], len(group.runs)
        name = re.sub(r"[^A-Za-z0-9]+", "-", run.label).strip("-") or "run"
        drawn = draw(plots, f"{_FIGURES}/{number:02d}-{name}")
        text = str(run.run.path) + (f", the first of {seeds} that differ in the seed alone" if seeds > 1 else "")
        singles.append(Section(run.label, text, figures=drawn, closed=True))
    if len(runs) > 1 and (missing := _pop_missing(singles)):
        singles = [section for section in singles if section.figures]
        singles.append(Section("Not shown of single runs", missing))
    if others := ", ".join(group.title for group in groups[figures.MOST_DETAILED :]):
        text = f"Only the first {figures.MOST_DETAILED} runs are shown one by one; report the others by themselves"
        singles.append(Section("Other runs", f"{text}: {others}."))
    return [*sections, *singles, Section("Settings of the runs", table=build_settings_table(runs), closed=True)]


def _pop_missing(sections: Sequence[Section]) -> str:
    """Takes what is missing in single runs out of their sections, as one text: titles, runs, and why."""
    runs: dict[tuple[str, str], list[str]] = {}  # by title and reason
    for section in sections:
        for figure in section.figures:
            if isinstance(figure, Missing):
                runs.setdefault((figure.title, figure.why), []).append(section.title)
        section.figures = [figure for figure in section.figures if not isinstance(figure, Missing)]
    texts = [f"{title}: {', '.join(labels)} ({why})" for (title, why), labels in runs.items()]
    return "; ".join(texts) + "." * bool(texts)


def _find_linked_files(page_text: str) -> set[str]:
    return {link for link in _LINK.findall(page_text) if ".." not in link}


def _delete_files(out: Path, files: set[str]) -> None:
    """Deletes files that only an earlier page linked to, and folders that are empty then."""
    for name in files:
        (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in files} - {out / _FIGURES}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _describe_run(named_run: NamedRun, runs: Sequence[NamedRun]) -> Iterator[str]:
    """What there is to say of a run: an early end, its jobs, a parent among the runs, and notes."""
    run, label = named_run.run, named_run.label
    if why := run.stopped_early:
        last, rounds = int(run.columns["round"][-1]), run.config["training"]["rounds"]
        yield f"{label} stopped early after round {last} of {rounds}: {why}."
    if usage := job_file.usage(run.path):
        yield f"{label} used {usage}."
    for other in runs if named_run.first else ():
        if run.shared_rounds(other.run):
            yield f"{label} left {other.label} after round {named_run.first}, and is drawn from there."
    yield from (f"{label}: {note}." for note in run.notes)


def _describe_data(runs: Sequence[NamedRun]) -> str:
    config = runs[0].run.config
    names = [str(config.get(section, {}).get("name", "?")) for section in ("data", "partition")]
    clients = config.get("partition", {}).get("clients")
    return f"Data {names[0]}, partition {names[1]}" + (f", {clients} clients." if clients else ".")


# --- the table of runs


_MOST_OWNERS = 8  # labels beside a value of a setting
_NOT_ON_PAGE = (  # but in runs.csv
    *("std over clients", "training loss", "test loss", "time per round (s)"),
    *("up, wire (bytes)", "down, wire (bytes)"),
)


_WORST_TENTH = ("lowest 10 %", "highest 10 %")
_FIRST = ("run", "seeds")  # columns that are shown before options that all runs have, and after two of these
_NEXT = ("last (", "best (", "worst client (", "gain over local", "rounds to", "sent to", "time (s)", *_WORST_TENTH)
_MOST_COLUMNS, _MOST_OPTIONS = 8, 2
_OF_MAIN = ("best", "last", "worst client", *_WORST_TENTH, "unseen", "after training")
_HIGHER_IS_BETTER = ("accuracy", "macro", "gain")
_LOWER_IS_BETTER = ("test loss", "clients below", "rounds to", "time to", "bytes to")


def build_runs_table(lines: Sequence[Line], lower: bool = False) -> PageTable:
    """The lines of runs for readers, with the best values marked, and columns beyond eight by choice.

    `runs.csv` has more, in plain bytes, and the whole paths of the folders.

    Args:
        lower: whether lower values of the main measure are better.
    """
    lines = [{name: line[name] for name in line if summary.column_of(name) not in _NOT_ON_PAGE} for line in lines]
    rows = summary.for_readers(lines)
    folders = _shorten_folders([row.pop("folder") for row in rows])
    columns = [*rows[0], "folder"]
    options = [name for name in columns[: columns.index("rounds")] if name not in (*_FIRST, "seed")]
    of_all = [name for name in options if all(row[name] for row in rows)]
    first = [*_FIRST, *of_all[:_MOST_OPTIONS]]
    chosen = _NEXT[1:2] if "validation" in map(summary.column_of, columns) else ()  # no test sample chose that round
    first += [next((name for name in columns if name.startswith(start)), "") for start in (*chosen, *_NEXT)]
    shown = [name for name in dict.fromkeys(first) if name in columns][:_MOST_COLUMNS]
    values = [name for name in lines[0] if name != "folder" and not name.endswith(" ±")]  # in the order of the columns
    marked = [
        (row, column)
        for column, name in enumerate(values)
        for row in _find_best_rows(name, [line[name] for line in lines], lower)
    ]
    cells = [[*row.values(), folder] for row, folder in zip(rows, folders, strict=True)]
    optional = [place for place, name in enumerate(columns) if name not in shown]
    return PageTable(columns, cells, long=1, marked=marked, optional=optional)


def _find_best_rows(name: str, values: Sequence[Value], lower: bool) -> list[int]:
    """The places of the best values of a column; none where there is nothing to compare, or neither end is better."""
    known = {place: value for place, value in enumerate(values) if not isinstance(value, str) and value == value}
    of_main = summary.column_of(name) in _OF_MAIN
    if len(known) < 2 or not (of_main or name.startswith((*_HIGHER_IS_BETTER, *_LOWER_IS_BETTER))):
        return []
    best = (min if (lower if of_main else name.startswith(_LOWER_IS_BETTER)) else max)(known.values())
    return [place for place, value in known.items() if value == best]


def build_settings_table(runs: Sequence[NamedRun]) -> PageTable:
    """The whole configurations, with what the runs have recorded: a line for each value of a setting, and its runs."""
    owners: dict[str, dict[str, list[str]]] = {}  # key -> value -> labels
    for named_run in runs:
        for key, value in by_key(named_run.run.config).items():
            owners.setdefault(key, {}).setdefault(yaml_text(value), []).append(named_run.label)
    rows = [
        (key, value, "all" if len(labels) == len(runs) else join_truncated(labels, _MOST_OWNERS))
        for key, values in owners.items()
        for value, labels in values.items()
    ]
    return PageTable(["setting", "value", "runs"], rows, names=3)


def _shorten_folders(folders: Sequence[str]) -> Sequence[str]:
    """Paths relative to the deepest folder that contains all of them; a lone one is left as it is."""
    if len(set(folders)) == 1:
        return folders
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]

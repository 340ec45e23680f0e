"""A report over some runs, written to a folder: the page, its figures and their tables."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pflmpi import atomic
from pflmpi.analysis import figures
from pflmpi.analysis.comparable import readable
from pflmpi.analysis.drawing import html
from pflmpi.analysis.drawing.html import PageFigure, PageTable, Section, draw_figures
from pflmpi.analysis.figures import Plots
from pflmpi.analysis.plots import Missing
from pflmpi.analysis.selection import NamedRun, named
from pflmpi.analysis.series.clients import single_clients
from pflmpi.analysis.summary import EXPLAINED, Line, for_readers, summaries, targets_of, texts
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.store import job_file
from pflmpi.text import comma_separated

PAGE, _FIGURES = "report.html", "figures"
_LINK = re.compile(rf'href="({_FIGURES}/[^"]+)"')


def write_report(
    paths: Sequence[Path],
    out: Path,
    update: Callable[[int, int], None],
    targets: Sequence[float] = (),
    pictures: Sequence[str] = (),
    reload: int = 0,
) -> list[str]:
    """Write the report to a folder; return what could not be read or compared, and was left out.

    Args:
        update: called with how many steps are done, of how many.
        targets: accuracies, as shares, until which the cost is shown; by default those of `targets_of`.
        pictures: "png", "pdf" or both, as which every figure is written too.
        reload: seconds after which a browser loads the page again; 0 for never.

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

    readable_runs, problems = readable(paths, step)
    if not readable_runs:
        raise CheckpointError("; ".join(problems))
    runs = named(readable_runs)
    total += len(runs[: figures.MOST_DETAILED])
    try:
        (out / _FIGURES).mkdir(parents=True, exist_ok=True)
        former = (out / PAGE).read_text("utf-8", "replace") if (out / PAGE).exists() else ""
        lines = summaries(runs, targets or targets_of(readable_runs))
        table = [list(lines[0]), *(list(texts(line).values()) for line in lines)]
        (out / "runs.csv").write_text(comma_separated(table), encoding="utf-8")
        details = []
        for named_run in runs[: figures.MOST_DETAILED]:
            plots, unread = figures.detailed(named_run)
            details.append(plots)
            problems += unread
            step()
        sections = _sections(runs, lines, details, partial(draw_figures, out, pictures))
        title = f"{runs[0].label}: report" if len(runs) == 1 else f"{len(runs)} runs: report"
        text = html.page(title, _about(runs), problems, sections)
        if reload:
            text = text.replace("<title>", f'<meta http-equiv="refresh" content="{reload}">\n<title>', 1)
        atomic.write(out / PAGE, text.encode())  # a browser that reloads sees a whole page
        _remove(out, _linked_files(former) - _linked_files(text))
    except OSError as error:
        raise ConfigError(f"cannot write the report in {out}: {error.strerror}; choose another --out") from error
    return problems


def _sections(
    runs: Sequence[NamedRun],
    lines: Sequence[Line],
    details: Sequence[Plots],
    draw: Callable[[Plots, str], list[PageFigure | Missing]],
) -> list[Section]:
    """The sections of the page.

    Args:
        lines: of the table of runs.
        details: the figures of the first runs.
        draw: draws figures into a folder.
    """
    several = len(runs) > 1
    notes = [f"{named_run.label}: {note}." for named_run in runs for note in named_run.run.notes]
    first = Section(
        "Runs", " ".join([*_stopped(runs), *_used(runs), *_forked(runs), *notes]), EXPLAINED, runs_table(lines)
    )
    multiples, rest = figures.side_by_side([(run.label, plots) for run, plots in zip(runs, details, strict=False)])
    together = draw([*figures.compared(runs), *multiples], _FIGURES)
    sections = [first, Section("All runs" if several else "The run", figures=together)]
    if of_clients := draw(single_clients(runs, details), _FIGURES):
        sections.append(Section("Single clients", figures=of_clients, kind="client"))
    singles = []
    for number, (named_run, plots) in enumerate(zip(runs, rest, strict=False), 1):
        name = re.sub(r"[^A-Za-z0-9]+", "-", named_run.label).strip("-") or "run"
        drawn = draw(plots, f"{_FIGURES}/{number:02d}-{name}")
        singles.append(Section(named_run.label, str(named_run.run.path), figures=drawn))
    if several and (missing := _missing(singles)):
        singles = [section for section in singles if section.figures]
        singles.append(Section("Not shown of single runs", missing))
    if others := ", ".join(named_run.label for named_run in runs[figures.MOST_DETAILED :]):
        text = f"Only the first {figures.MOST_DETAILED} runs are shown one by one; report the others by themselves"
        singles.append(Section("Other runs", f"{text}: {others}."))
    return [*sections, *singles]


def _missing(sections: Sequence[Section]) -> str:
    """Takes what is missing in single runs out of their sections, as one text: titles, their runs, the first reason."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for section in sections:
        for figure in section.figures:
            if isinstance(figure, Missing):
                reasons.setdefault(figure.title, []).append((section.title, figure.why))
        section.figures = [figure for figure in section.figures if not isinstance(figure, Missing)]
    texts = [f"{title}: {', '.join(run for run, _ in of_runs)} ({of_runs[0][1]})" for title, of_runs in reasons.items()]
    return "; ".join(texts) + "." * bool(texts)


def _linked_files(page_text: str) -> set[str]:
    """Files of figures that a page links to, relative to it."""
    return {link for link in _LINK.findall(page_text) if ".." not in link}


def _remove(out: Path, files: set[str]) -> None:
    """Deletes files that only an earlier page linked to, and folders that are empty then."""
    for name in files:
        (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in files} - {out / _FIGURES}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _stopped(runs: Sequence[NamedRun]) -> Iterator[str]:
    """A sentence for each run that has ended before its last round."""
    for named_run in runs:
        if why := named_run.run.stopped_early:
            last, rounds = int(named_run.run.columns["round"][-1]), named_run.run.config["training"]["rounds"]
            yield f"{named_run.label} stopped early after round {last} of {rounds}: {why}."


def _used(runs: Sequence[NamedRun]) -> Iterator[str]:
    """A sentence on the jobs of each run that jobs have started."""
    for named_run in runs:
        if usage := job_file.usage(named_run.run.path):
            yield f"{named_run.label} used {usage}."


def _forked(runs: Sequence[NamedRun]) -> Iterator[str]:
    """A sentence for each fork of another of the runs."""
    for named_run in runs:
        for other in runs if named_run.first else ():
            if named_run.run.shared_rounds(other.run):
                yield f"{named_run.label} left {other.label} after round {named_run.first}, and is drawn from there."


def _about(runs: Sequence[NamedRun]) -> str:
    config = runs[0].run.config
    names = [str(config.get(section, {}).get("name", "?")) for section in ("data", "partition")]
    clients = config.get("partition", {}).get("clients")
    return f"Data {names[0]}, partition {names[1]}" + (f", {clients} clients." if clients else ".")


# --- the table of runs


_NOT_ON_PAGE = (  # but in runs.csv
    *("std over clients (%)", "training loss", "test loss", "time per round (s)"),
    *("up, wire (bytes)", "down, wire (bytes)"),
)


def runs_table(lines: Sequence[Line]) -> PageTable:
    """The lines of runs for readers; `runs.csv` has more, in plain bytes, and the whole paths of the folders."""
    rows = for_readers([{name: line[name] for name in line if name not in _NOT_ON_PAGE} for line in lines])
    folders = _below_common_folder([row.pop("folder") for row in rows])
    cells = [[*row.values(), folder] for row, folder in zip(rows, folders, strict=True)]
    return PageTable([*rows[0], "folder"], cells, long=1)


def _below_common_folder(folders: Sequence[str]) -> Sequence[str]:
    """Paths relative to the deepest folder that contains all of them; a lone one is left as it is."""
    if len(set(folders)) == 1:
        return folders
    shared = os.path.commonpath([os.path.dirname(folder) for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]

"""A report over some runs, written to a folder: the page, its figures and their tables."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pflmpi.analysis.comparable import readable
from pflmpi.analysis.page import contents, html
from pflmpi.analysis.page.figures import draw_figures
from pflmpi.analysis.page.html import PageFigure, Section
from pflmpi.analysis.page.runs_table import table
from pflmpi.analysis.page.side_by_side import Figures, side_by_side
from pflmpi.analysis.plots import Missing
from pflmpi.analysis.selection import NamedRun, named
from pflmpi.analysis.series.clients import Final, final, single_clients
from pflmpi.analysis.summary import EXPLAINED, Line, cells, summaries, targets_of
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.text import comma_separated

PAGE, _FIGURES = "report.html", "figures"
_LINK = re.compile(rf'href="({_FIGURES}/[^"]+)"')


def write_report(
    paths: Sequence[Path],
    out: Path,
    update: Callable[[int, int], None],
    targets: Sequence[float] = (),
    pictures: Sequence[str] = (),
) -> list[str]:
    """Write the report to a folder; return what could not be read or compared, and was left out.

    Args:
        update: called with how many steps are done, of how many.
        targets: accuracies, as shares, until which the cost is shown; by default those of `targets_of`.
        pictures: "png", "pdf" or both, as which every figure is written too.

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

    runs, problems = readable(paths, step)
    if not runs:
        raise CheckpointError("; ".join(problems))
    among = named(runs)
    total += len(among[: contents.MOST_DETAILED])
    try:
        (out / _FIGURES).mkdir(parents=True, exist_ok=True)
        former = (out / PAGE).read_text("utf-8", "replace") if (out / PAGE).exists() else ""
        drawn = partial(draw_figures, out, pictures)
        ends = [final(one.run) for one in among]
        lines = summaries(among, ends, targets or targets_of(runs))
        (out / "runs.csv").write_text(comma_separated([list(lines[0]), *map(cells, lines)]), encoding="utf-8")
        details = [_detailed(one, problems, step) for one in among[: contents.MOST_DETAILED]]
        sections = _sections(among, ends, lines, details, drawn)
        title = f"{among[0].label}: report" if len(among) == 1 else f"{len(among)} runs: report"
        text = html.page(title, _about(among), problems, sections)
        (out / PAGE).write_text(text, encoding="utf-8")
        _remove(out, _figures(former) - _figures(text))
    except OSError as error:
        raise ConfigError(f"cannot write the report in {out}: {error.strerror}; choose another --out") from error
    return problems


def _sections(
    among: Sequence[NamedRun],
    ends: Sequence[Final | None],
    lines: Sequence[Line],
    details: Sequence[Figures],
    drawn: Callable[[Figures, str], list[PageFigure | Missing]],
) -> list[Section]:
    """The sections of the page.

    Args:
        ends: the clients at the end of each run.
        lines: of the table of runs.
        details: the figures of the first runs.
        drawn: draws figures into a folder.
    """
    notes = [f"{one.label}: {note}." for one in among for note in one.run.notes]
    first = Section("Runs", " ".join([*_stopped(among), *notes]), EXPLAINED, [table(lines)])
    multiples, rest = side_by_side([(one.label, own) for one, own in zip(among, details, strict=False)])
    together = Section("All runs" if len(among) > 1 else "The run")
    together.figures = drawn([*contents.compared(among, ends), *multiples], _FIGURES)
    sections = [first, together]
    if of_clients := drawn(single_clients(among, details), _FIGURES):
        sections.append(Section("Single clients", figures=of_clients, kind="client"))
    count = len(sections)
    for number, (one, own) in enumerate(zip(among, rest, strict=False), 1):
        name = re.sub(r"[^A-Za-z0-9]+", "-", one.label).strip("-") or "run"
        sections.append(Section(one.label, str(one.run.path), figures=drawn(own, f"{_FIGURES}/{number:02d}-{name}")))
    if len(among) > 1 and (missing := _missing(sections[count:])):
        sections = [*sections[:count], *(section for section in sections[count:] if section.figures)]
        sections.append(Section("Not shown of single runs", missing))
    if len(among) > contents.MOST_DETAILED:
        others = ", ".join(one.label for one in among[contents.MOST_DETAILED :])
        text = f"Only the first {contents.MOST_DETAILED} runs are shown one by one; report the others by themselves"
        sections.append(Section("Other runs", f"{text}: {others}."))
    return sections


def _detailed(one: NamedRun, problems: list[str], step: Callable[[], None]) -> Figures:
    """The figures of one run, and more `problems`."""
    figures, unread = contents.detailed(one)
    problems += unread
    step()
    return figures


def _missing(sections: Sequence[Section]) -> str:
    """What is not shown of single runs, each once with the runs and the reason of the first; the sections lose it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in sections:
        for figure in section.figures:
            if isinstance(figure, Missing):
                found.setdefault(figure.title, []).append((section.title, figure.why))
        section.figures = [figure for figure in section.figures if not isinstance(figure, Missing)]
    texts = [f"{title}: {', '.join(run for run, _ in each)} ({each[0][1]})" for title, each in found.items()]
    return "; ".join(texts) + "." * bool(texts)


def _figures(page_text: str) -> set[str]:
    """Files of figures that a page links to, relative to it."""
    return {link for link in _LINK.findall(page_text) if ".." not in link}


def _remove(out: Path, files: set[str]) -> None:
    """Delete what an earlier page linked to and this one does not, and folders that are empty then."""
    for name in files:
        (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in files} - {out / _FIGURES}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _stopped(among: Sequence[NamedRun]) -> Iterator[str]:
    """A sentence for each run that has ended before its last round."""
    for one in among:
        if why := one.run.stopped_early:
            rounds = one.run.config["training"]["rounds"]
            yield f"{one.label} stopped early after round {int(one.run.columns['round'][-1])} of {rounds}: {why}."


def _about(among: Sequence[NamedRun]) -> str:
    config = among[0].run.config
    names = [str(config.get(section, {}).get("name", "?")) for section in ("data", "partition")]
    clients = config.get("partition", {}).get("clients")
    return f"Data {names[0]}, partition {names[1]}" + (f", {clients} clients." if clients else ".")

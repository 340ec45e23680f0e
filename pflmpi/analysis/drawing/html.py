"""A self-contained HTML page: figures, styles and scripts are inlined, nothing is fetched."""

import html
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pflmpi import atomic
from pflmpi.analysis.drawing.charts import COLOURS
from pflmpi.analysis.drawing.rendering import ON_DARK, Drawn, draw, dump_config, read_script
from pflmpi.analysis.plots import Missing, Plot, make_names_unique

_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

FIGURES = "figures"  # folder beside a page

_MARK = "<footer><p>Made by pflmpi"  # on every page, also of earlier versions
_LINK = re.compile(rf'href="({FIGURES}/[^"]+)"')
_MOST_LINES = 100_000  # lines of the CSV file of a figure
_HELP = (
    "Beside each figure: its numbers as CSV (up to 100,000 lines also those that are not drawn), and itself as a file. "
    "In a figure, a click in the legend shows that entry alone, and further ones add others; Ctrl and the wheel zoom, "
    "a drag moves, a double click resets. How each is measured: docs/analysis.md."
)


@dataclass(frozen=True)
class PageFigure:
    """A figure on the page; `path` is that of its files relative to the page, without a suffix."""

    drawn: Drawn
    path: str


@dataclass(frozen=True)
class PageTable:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1  # number of leading columns with names, aligned to the left; the others have numbers
    long: int = 0  # number of trailing columns with long texts, of which the ends are shown
    wrong: Sequence[int] = ()  # indices of rows that are highlighted as wrong
    marked: Collection[tuple[int, int]] = ()  # (row, column) of highlighted cells
    optional: Collection[int] = ()  # indices of columns that are hidden until a reader wants to see all


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    text: str = ""
    table: PageTable | None = None
    folded: Sequence[tuple[str, str]] = ()  # titles and texts of parts that are collapsed at first
    figures: Sequence[PageFigure | Missing] = ()
    kind: str = ""  # a CSS class
    closed: bool = False  # whether the section is collapsed at first


def read_earlier_page(path: Path, table: str, mark: str) -> str:
    """Returns the page that is about to be replaced, with a table beside it; "" if there is none.

    Args:
        table: name of the file of the table.
        mark: a part of every such table.

    Raises:
        ConfigError: one of them is not known to be from pflmpi.
    """
    atomic.read_earlier(path.with_name(table), mark, "choose another --out")
    return atomic.read_earlier(path, _MARK, "choose another --out")


def finish_page(path: Path, page: str, earlier: str) -> None:
    """Writes a page, and deletes the figures to which only the earlier one links, with folders that are left empty."""
    atomic.write(path, page.encode())  # atomic, as a browser may reload it at any time
    stale = [path.parent / link for link in {*_LINK.findall(earlier)} - {*_LINK.findall(page)} if ".." not in link]
    for file in stale:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in stale} - {path.parent / FIGURES}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def build_page(
    title: str, about: str, problems: Sequence[str], sections: Sequence[Section], made: str = "", reload: int = 0
) -> str:
    """The HTML of the page.

    Args:
        about: a line below the title.
        problems: what was left out, and why.
        made: a sentence for the footer: by which version, when, where and with which command the page was made.
        reload: seconds after which a browser reloads the page; 0 for never.
    """
    figures = [figure for section in sections for figure in section.figures if isinstance(figure, PageFigure)]
    numbers = {id(figure): number for number, figure in enumerate(figures)}
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
        *([f'<meta http-equiv="refresh" content="{reload}">'] if reload else []),
        f"<title>{_text(title)}</title>",
        f"<style>{_style()}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(about)}</p>",
        *_problems(problems),
        _contents(sections),
    ]
    for number, section in enumerate(sections, 1):
        parts += _section(section, f"s{number}", numbers)
    parts.append(f"<footer><p>{_text(made or 'Made by pflmpi.')} {_HELP}</p></footer>")
    if figures:
        charts = ",\n".join(figure.drawn.spec.replace("<", "\\u003c") for figure in figures)
        parts.append(f'<script type="application/json" id="config">{dump_config()}</script>')
        parts.append(
            f'<script type="application/json" id="charts">[{charts}]</script>\n<script>{read_script()}</script>'
        )
    return "\n".join([*parts, f"<script>{_read_static('page.js')}</script>", "</body></html>\n"])


def _problems(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    items = "".join(f"<li>{_text(problem)}</li>" for problem in problems)
    return [f'<section class="problems"><h2>Left out</h2><ul>{items}</ul></section>']


def _contents(sections: Sequence[Section]) -> str:
    items = "".join(f'<li><a href="#s{number}">{_text(part.title)}</a></li>' for number, part in enumerate(sections, 1))
    return f'<nav aria-label="contents"><ul>{items}</ul></nav>'


def _section(section: Section, anchor: str, numbers: Mapping[int, int]) -> list[str]:
    kind = f' class="{section.kind}"' if section.kind else ""
    heading = f"<h2>{_text(section.title)}</h2>"
    if section.closed:  # browsers open <details> when a link leads to an element inside
        parts = [f'<section{kind}><details><summary>{heading}</summary><div id="{anchor}">']
    else:
        parts = [f'<section{kind} id="{anchor}">{heading}']
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>")
    if section.table:
        parts.append(_table(section.table))
    for title, text in section.folded:
        parts.append(f"<details><summary>{_text(title)}</summary><p>{_text(text)}</p></details>")
    figures = [_figure(figure, numbers[id(figure)]) for figure in section.figures if isinstance(figure, PageFigure)]
    if figures:
        parts += ['<div class="figures">', *figures, "</div>"]
    missing = [f"{plot.title} ({plot.why})" for plot in section.figures if isinstance(plot, Missing)]
    if missing:
        parts.append(f'<p class="missing">Not shown: {_text("; ".join(missing))}.</p>')
    return [*parts, "</div></details></section>" if section.closed else "</section>"]


def _figure(figure: PageFigure, number: int) -> str:
    plot, drawn = figure.drawn.plot, figure.drawn
    kinds = ["csv", *(path.suffix[1:] for path in (drawn.svg, *drawn.pictures))]
    links = " ".join(f'<a href="{html.escape(figure.path, quote=True)}.{kind}">{kind.upper()}</a>' for kind in kinds)
    label = html.escape(f"{plot.title}. {plot.caption}", quote=True)
    drawing = f'<div class="drawing" role="img" aria-label="{label}" data-chart="{number}">{drawn.inline}</div>'
    caption = f"<figcaption>{_text(plot.caption)} {links}</figcaption>"
    return f'<figure class="panels{drawn.panels}"><h3>{_text(plot.title)}</h3>{drawing}{caption}</figure>'


def _table(table: PageTable) -> str:
    kinds = ["text"] * table.names + [""] * (len(table.columns) - table.names - table.long) + ["long"] * table.long

    def cell(row: int, column: int, text: str) -> str:
        tag, kind = "th" if row < 0 else "td", kinds[column]
        more, best = "more" * (column in table.optional), "best" * ((row, column) in table.marked)
        classes = " ".join(filter(None, [kind, more, best]))
        start = f'<{tag} class="{classes}">' if classes else f"<{tag}>"
        return f"{start}{_cell(kind, text)}</{tag}>"

    def row(number: int, texts: Sequence[str]) -> str:
        cells = "".join(cell(number, column, text) for column, text in enumerate(texts))
        return f"<tr{' class=wrong' if number in table.wrong else ''}>{cells}</tr>"

    body = "".join(row(number, texts) for number, texts in enumerate(table.rows))
    switch = f'<input type="checkbox" id="columns"> <label for="columns">all {len(kinds)} columns</label>'
    content = f'<div class="wide"><table><thead>{row(-1, table.columns)}</thead><tbody>{body}</tbody></table></div>'
    return switch + content if table.optional else content


def _style() -> str:
    """The style sheet, with the colours of figures as variables --c0, --c1, ..."""
    light, dark = (
        " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours)) for colours in (COLOURS, ON_DARK)
    )
    colours = f":root {{ {light} }} @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f"{colours}\n{_read_static('page.css')}"


def _cell(kind: str, text: str) -> str:
    """The HTML of a cell; a long text is also a tooltip, as the page shows only its end."""
    return f'<bdi title="{html.escape(text, quote=True)}">{_text(text)}</bdi>' if "long" in kind else _text(text)


def _read_static(name: str) -> str:
    """Reads a static file that is inlined into every page."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def draw_figures(
    out: Path,
    pictures: Sequence[str],
    figures: Sequence[Plot | Missing],
    folder: str,
    update: Callable[[int, int], None] = lambda *_: None,
    whole: bool = False,
) -> list[PageFigure | Missing]:
    """Draws figures into a folder below that of their page, as SVG and CSV.

    Args:
        out: folder of the page.
        pictures: further formats, of "png" and "pdf".
        update: called with the number of figures that are drawn, and of all.
        whole: write all values as CSV, even if they are more than 100,000 lines.
    """
    (out / folder).mkdir(parents=True, exist_ok=True)
    result: list[PageFigure | Missing] = []
    for number, figure in enumerate(make_names_unique(figures), 1):
        if isinstance(figure, Missing):
            result.append(figure)
            continue
        table = figure.table(None if whole else _MOST_LINES)
        atomic.write(out / folder / f"{figure.name}.csv", table.encode())
        result.append(PageFigure(draw(figure, out / folder, pictures), f"{folder}/{figure.name}"))
        update(number, len(figures))
    return result

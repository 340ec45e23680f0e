"""One HTML page that needs nothing else: figures and style are in it, no script, no network."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pflmpi.analysis.drawing.files import Drawn
from pflmpi.analysis.drawing.style import COLOURS, ON_DARK
from pflmpi.analysis.plots import Missing, Plot

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1a1c1f; --soft: #5a6068; --line: #d4d8dd; --warn: #a03000;
  LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15181c; --ink: #e6e8eb; --soft: #a4abb3; --line: #3a4048; --warn: #ffb088; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
a { color: inherit; }
figure { margin: 0.5rem 0 2rem; }
figure svg { display: block; width: 100%; max-width: 800px; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption, .missing, footer { color: var(--soft); max-width: 50rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.5rem; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.wrong td { color: var(--warn); font-weight: bold; }
.problems { border-left: 4px solid var(--warn); padding-left: 1rem; overflow-wrap: anywhere; }
nav ul { columns: 16rem; padding-left: 1.2rem; }
"""


@dataclass(frozen=True)
class PageFigure:
    """A figure on the page, with the path of its files relative to the page, without an ending, and their endings."""

    plot: Plot
    drawn: Drawn
    path: str
    kinds: Sequence[str] = ("csv", "png", "svg")


@dataclass(frozen=True)
class PageTable:
    """Texts by row and column; the first columns are names, aligned to the left, the rest numbers.

    Attributes:
        wrong: rows that stand out because something is wrong with them.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    wrong: Sequence[int] = ()


@dataclass
class Section:
    """A part of the page."""

    title: str
    text: str = ""
    tables: list[PageTable] = field(default_factory=list)
    figures: list[PageFigure | Missing] = field(default_factory=list)


def page(title: str, about: str, problems: Sequence[str], sections: Sequence[Section]) -> str:
    """HTML of the page.

    Args:
        title: of the page.
        about: a line below it.
        problems: what was left out, and why.
        sections: in their order.
    """
    anchors = {id(section): f"s{number}" for number, section in enumerate(sections, 1)}
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title>",
        f"<style>{_style()}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(about)}</p>",
        *_problems(problems),
        _contents(sections, anchors),
    ]
    for section in sections:
        parts += _section(section, anchors[id(section)])
    beside = "Made by pflmpi report. Beside each figure: its numbers as CSV, and itself as PNG and SVG."
    return "\n".join([*parts, f"<footer><p>{beside}</p></footer></body></html>\n"])


def _problems(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    items = "".join(f"<li>{_text(problem)}</li>" for problem in problems)
    return [f'<section class="problems"><h2>Left out</h2><ul>{items}</ul></section>']


def _contents(sections: Sequence[Section], anchors: Mapping[int, str]) -> str:
    items = "".join(f'<li><a href="#{anchors[id(one)]}">{_text(one.title)}</a></li>' for one in sections)
    return f'<nav aria-label="contents"><ul>{items}</ul></nav>'


def _section(section: Section, anchor: str) -> list[str]:
    parts = [f'<section id="{anchor}"><h2>{_text(section.title)}</h2>']
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>")
    parts += [_table(table) for table in section.tables]
    parts += [_figure(figure) for figure in section.figures if isinstance(figure, PageFigure)]
    missing = [f"{each.title} ({each.why})" for each in section.figures if isinstance(each, Missing)]
    if missing:
        parts.append(f'<p class="missing">Not shown: {_text("; ".join(missing))}.</p>')
    return [*parts, "</section>"]


def _figure(shown: PageFigure) -> str:
    plot = shown.plot
    described = html.escape(f"{plot.title}. {plot.caption}", quote=True)
    inline = re.sub(r"^<svg", f'<svg role="img" aria-label="{described}"', shown.drawn.inline, count=1)
    links = " ".join(
        f'<a href="{html.escape(shown.path, quote=True)}.{kind}">{kind.upper()}</a>' for kind in shown.kinds
    )
    caption = f"<figcaption>{_text(plot.caption)} {links}</figcaption>"
    return f"<h3>{_text(plot.title)}</h3>\n<figure>{inline}\n{caption}</figure>"


def _table(table: PageTable) -> str:
    def row(cells: Sequence[str], tag: str, wrong: bool = False) -> str:
        texts = (
            f"<{tag}{' class=text' if place < table.names else ''}>{_text(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr{' class=wrong' * wrong}>{''.join(texts)}</tr>"

    body = "".join(row(cells, "td", number in table.wrong) for number, cells in enumerate(table.rows))
    return f'<div class="wide"><table><thead>{row(table.columns, "th")}</thead><tbody>{body}</tbody></table></div>'


def _style() -> str:
    light, dark = (
        " ".join(f"--c{number}: {colour};" for number, colour in enumerate(colours)) for colours in (COLOURS, ON_DARK)
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


def _text(text: str) -> str:
    return html.escape(text, quote=False)

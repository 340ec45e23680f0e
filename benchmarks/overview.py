"""How near the results come to the papers: cells run, inside the published spread, within one point, outside.

    python benchmarks/overview.py                 # the count
    python benchmarks/overview.py --write         # and in results/README.md, and the tables in the papers' pages
    python benchmarks/overview.py --add sweeps    # first takes the finished cells of the sweeps in that folder

Counted from results/*.csv, of the form that `pflmpi table TABLE` writes, and the table files in configs/papers, which
have one reading of each paper, the one for which there is evidence. Cells with other settings than their file's are
not added, unless `-s` says these; one that several tables have is taken from the sweep that has run it. A FedProx that
misses beside a FedAvg that misses is not counted: with a small weight the two are one algorithm.
"""

import argparse
import csv
import json
import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.analysis.table import compute_entries, metric_of
from pflmpi.analysis.table_text import format_entries_csv, rate_difference
from pflmpi.config.sections import by_key
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.sweep.table import Cell, find_sweep_folder, list_cells, load

ROOT = Path(__file__).parent.parent
RESULTS, CONFIGS = ROOT / "results", ROOT / "configs" / "papers"
PAPERS = {"fedgmh": "FedGMH", "fedfcd": "FedFCD", "pfedpm": "pFedPM", "pfedcfr": "pFedCFR", "pfedafe": "pFedAFE"}
FITS = ("inside", "within a point", "outside")
BEGIN, END = "<!-- benchmarks/overview.py --write -->", "<!-- end of what it writes -->"
Line = dict[str, str]


def overview(results: Path = RESULTS, papers: Path = CONFIGS) -> str:
    """The count as Markdown, a line for each paper and one for all."""
    lines = [(PAPERS[paper], *_counts(paper, results, papers)) for paper in PAPERS]
    lines.append(("all", *map(sum, zip(*(line[1:] for line in lines), strict=True))))
    return _markdown([("paper", "files", "cells", "run", "inside", "near", "outside"), *lines])


def _counts(paper: str, results: Path, papers: Path) -> list[int]:
    paths = sorted((papers / paper).glob("*.yaml"))
    tables = [table for table in map(load, paths) if metric_of(table.metric).unit == "percent"]
    published = sum(len(columns) for table in tables for columns in table.published.values())
    fits = sum((_fits(_read(results / f"{path.stem}.csv")) for path in paths), Counter[str]())
    return [len(paths), published, sum(fits[fit] for fit in FITS), *(fits[fit] for fit in FITS)]


def _fits(lines: list[Line]) -> Counter[str]:
    """How many cells come how near; "" without a published figure, "twice" for FedProx beside FedAvg."""
    missed = {line["column"] for line in lines if line["row"] == "FedAvg" and _fit(line) == "outside"}
    twice = [line["row"] == "FedProx" and _fit(line) == "outside" and line["column"] in missed for line in lines]
    return Counter("twice" if again else _fit(line) for line, again in zip(lines, twice, strict=True))


def _read(path: Path) -> list[Line]:
    """The cells of a table's CSV file that were run; none where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line for line in csv.DictReader(text.splitlines()) if line["ours"]]


def _fit(line: Line) -> str:
    if metric_of(line["metric"]).unit != "percent" or not line["published"]:
        return ""
    return rate_difference(_difference(line), float(line["published_spread"]) if line["published_spread"] else None)


def _difference(line: Line) -> float:
    return float(line["ours"]) - float(line["published"])


def tables_of(paper: str, results: Path = RESULTS, papers: Path = CONFIGS) -> str:
    """The cells of a paper that were run, table by table: ours, the published figure, what is furthest."""
    files = [(path, _read(results / f"{path.stem}.csv")) for path in sorted((papers / paper).glob("*.yaml"))]
    return "\n".join(_shown(path, lines) for path, lines in files if lines)


def _shown(path: Path, lines: list[Line]) -> str:
    table = load(path)
    columns = [name for name in table.columns if any(line["column"] == name for line in lines)]
    by_place = {(line["row"], line["column"]): line for line in lines}
    rows = [[row, *(_beside(by_place.get((row, name))) for name in columns)] for row in table.rows]
    hashes = {name: [line["partitions"] for line in lines if line["column"] == name] for name in columns}
    partitions = [f"{name} {' '.join(dict.fromkeys(texts))}" for name, texts in hashes.items()]
    outside = sorted((line for line in lines if _fit(line) == "outside"), key=lambda line: -abs(_difference(line)))
    furthest = [f"{line['row']}, {line['column']} {_difference(line):+.2f}" for line in outside[:3]]
    seeds = sorted({int(line["seeds_finished"]) for line in lines})
    rounds = {(cell.row, cell.column): cell.raw["training"]["rounds"] for cell in list_cells(table, [], 1)}
    taken = {place: int(line["rounds_done"]) // int(line["seeds_finished"]) for place, line in by_place.items()}
    options = [f"--seeds {seeds[-1]}"] if seeds[-1] < len(table.seeds) else []
    options += [f"--only {shlex.quote(f'*/{name}')}" for name in columns] if columns != [*table.columns] else []
    options += [f"-s training.rounds={n}" for n in sorted({n for place, n in taken.items() if n < rounds[place]})]
    command = f"pflmpi sweep configs/papers/{path.parent.name}/{path.name}"
    title = f"**{table.title}**; {metric_of(table.metric).name}, {table.figure} round"
    lines_below = [f"Partitions: {', '.join(partitions)}."]
    if metric_of(table.metric).unit == "percent":
        lines_below.insert(0, f"Furthest: {'; '.join(furthest) or 'none is outside'}.")
    parts = [
        textwrap.fill(f"{title}, {' or '.join(map(str, seeds))} of {len(table.seeds)} seeds.", 120),
        _markdown([["", *columns], *(row for row in rows if any(row[1:]))]).rstrip(),
        "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines_below),
    ]
    return "\n\n".join(parts) + "\n```\n" + " \\\n    ".join([command, *options]) + "\n```\n"


def _beside(line: Line | None) -> str:
    """Ours and the published figure, each with its spread, as one word; bold where it is outside."""
    if line is None:
        return ""

    def value(name: str, spread: str) -> str:
        return "±".join(filter(None, (line[name], line[spread])))

    ours, published = value("ours", "ours_std"), value("published", "published_spread")
    return (f"**{ours}**" if _fit(line) == "outside" else ours) + (f" ({published})" if published else "")


def _markdown(rows: Sequence[Sequence[str | int]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, ["---"] * len(head), *body))


@dataclass(frozen=True)
class CellElsewhere(Cell):
    """A cell whose run is in a folder that may be that of another table."""

    place: Path

    def run(self, out: Path) -> Path:
        return self.place


def settings(cell: Cell) -> str:
    """What decides the results of a cell, as text."""
    return json.dumps(
        {key: value for key, value in by_key(cell.raw).items() if key not in FREE_ON_RESUME}, sort_keys=True
    )


def add(sweeps: Path, overrides: Sequence[str], results: Path = RESULTS, papers: Path = CONFIGS) -> None:
    """Put the finished cells of sweeps into the CSV files; one of more seeds that is there stays."""
    paths = [path for paper in PAPERS for path in sorted((papers / paper).glob("*.yaml"))]
    swept = {path: list_cells(load(path), overrides, None) for path in paths}
    places = {path: sweeps / find_sweep_folder(path, None).name for path in paths}
    runs = {settings(cell): run for path in paths for cell in swept[path] if (run := cell.run(places[path])).exists()}
    for path in paths:
        table, file = load(path), results / f"{path.stem}.csv"
        owned = [(cell, cell.run(places[path])) for cell in swept[path]]
        found = [
            CellElsewhere(**vars(cell), place=own if own.exists() else runs.get(settings(cell), own))
            for cell, own in owned
        ]
        filled = (
            [entry for entry in compute_entries(table, found, places[path]) if entry.finished]
            if table.published
            else []
        )
        new = [*csv.DictReader(format_entries_csv(table, filled).splitlines())] if filled else []
        best: dict[tuple[str, str], Line] = {}
        for line in [*_read(file), *new]:
            other = best.setdefault((line["row"], line["column"]), line)
            if int(line["seeds_finished"]) >= int(other["seeds_finished"]):
                best[line["row"], line["column"]] = line
        if new:
            ordered = [(row, column) for row in table.rows for column in table.columns]
            with file.open("w", encoding="utf-8") as out:
                writer = csv.DictWriter(out, list(new[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(best[place] for place in ordered if place in best)
            print(f"{file.name}: {len(new)} cells are finished")


def pages() -> dict[Path, str]:
    """The pages with what this file writes into them."""
    texts = {RESULTS / "README.md": overview(), **{RESULTS / f"{paper}.md": tables_of(paper) for paper in PAPERS}}
    return {path: _put(path.read_text(encoding="utf-8"), text) for path, text in texts.items()}


def _put(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the count and the tables into the pages")
    parser.add_argument("--add", type=Path, metavar="SWEEPS", help="take the finished cells from there, and write")
    parser.add_argument("-s", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.add:
        add(options.add, options.overrides)
    print(overview(), end="")
    if options.write or options.add:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

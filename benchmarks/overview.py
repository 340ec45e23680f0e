"""How near the results come to the papers: cells run, inside the published spread, within one point, outside.

    python benchmarks/overview.py            # the table
    python benchmarks/overview.py --write    # and in results/README.md

Counted from results/*.csv of the form that `pflmpi table TABLE` writes, and the table files in configs/papers. Runs
with another reading than the table file has are in results/*_readings.csv, whose columns are COLUMN; READING, and
counted apart: so are the cells outside that at least one of them brings within a point.
"""

import argparse
import csv
import re
from collections import Counter
from pathlib import Path

from pflmpi.analysis.table import METRICS, closeness
from pflmpi.sweep.table import load

ROOT = Path(__file__).parent.parent
PAPERS = {"fedgmh": "FedGMH", "fedfcd": "FedFCD", "pfedpm": "pFedPM", "pfedcfr": "pFedCFR", "pfedafe": "pFedAFE"}
FITS = ("inside", "within a point", "outside")
BEGIN, END = "<!-- overview: benchmarks/overview.py --write -->", "<!-- end of the overview -->"


def overview(results: Path = ROOT / "results", papers: Path = ROOT / "configs" / "papers") -> str:
    """The table as Markdown, a line for each paper and one for all."""
    head = ("paper", "files", "with results", "cells", "run", *FITS, "explained", "unpublished", "readings")
    lines = [(PAPERS[paper], *_counts(paper, results, papers)) for paper in PAPERS]
    lines.append(("all", *map(sum, zip(*(line[1:] for line in lines), strict=True))))
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _counts(paper: str, results: Path, papers: Path) -> list[int]:
    tables = sorted((papers / paper).glob("*.yaml"))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in results.glob("*.md"))
    shown = [path for path in tables if re.search(rf"pflmpi (sweep|table) \S*/{path.stem}\.yaml", pages)]
    published = sum(
        len(columns)
        for table in map(load, tables)
        if METRICS[table.metric].unit == "percent"
        for columns in table.published.values()
    )
    counts: Counter[str] = Counter()
    explained = 0
    for path in sorted(results.glob(f"{paper}_*.csv")):
        lines = _lines(path)
        if path.stem.endswith("_readings"):
            counts["reading"] += len(lines)
            continue
        readings = _lines(path.with_stem(f"{path.stem}_readings"))
        near = {(line["row"], line["column"].partition(";")[0]) for line in readings if _fit(line) in FITS[:2]}
        for line in lines:
            counts[_fit(line)] += 1
            explained += _fit(line) == "outside" and (line["row"], line["column"]) in near
    fits = [counts[fit] for fit in FITS]
    return [len(tables), len(shown), published, sum(fits), *fits, explained, counts[""], counts["reading"]]


def _lines(path: Path) -> list[dict[str, str]]:
    """The cells of a table's CSV file that were run; none where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [line for line in csv.DictReader(text.splitlines()) if line["ours"]]


def _fit(line: dict[str, str]) -> str:
    if METRICS[line["metric"]].unit != "percent" or not line["published"]:
        return ""
    spread = float(line["published_spread"]) if line["published_spread"] else None
    return closeness(float(line["ours"]) - float(line["published"]), spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into results/README.md")
    options = parser.parse_args()
    table = overview()
    print(table, end="")
    if options.write:
        page = ROOT / "results" / "README.md"
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        page.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

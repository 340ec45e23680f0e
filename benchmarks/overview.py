"""How near the results come to the papers: cells run, inside the published spread, within one point, outside.

    python benchmarks/overview.py            # the table
    python benchmarks/overview.py --write    # and in results/README.md

Counted from results/*.csv of the form that `pflmpi table TABLE` writes, and the table files in configs/papers, which
have one reading of each paper, the one for which there is evidence. *_earlier.csv are cells that were run as the file
was before it had that reading, *_readings.csv with another one, whose columns are COLUMN; READING. No cell is counted
by the reading that suits it. A FedProx that misses beside a FedAvg that misses is not counted: with a small weight the
two are one algorithm.
"""

import argparse
import csv
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
    fits = ("inside", "near", "outside")
    head = ("paper", "files", "cells", "run", *fits, "before", *fits, "unpublished", "readings")
    lines = [(PAPERS[paper], *_counts(paper, results, papers)) for paper in PAPERS]
    lines.append(("all", *map(sum, zip(*(line[1:] for line in lines), strict=True))))
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _counts(paper: str, results: Path, papers: Path) -> list[int]:
    tables = sorted((papers / paper).glob("*.yaml"))
    published = sum(
        len(columns)
        for table in map(load, tables)
        if METRICS[table.metric].unit == "percent"
        for columns in table.published.values()
    )
    counts: dict[str, Counter[str]] = {edition: Counter() for edition in ("", "earlier", "readings")}
    for path in sorted(results.glob(f"{paper}_*.csv")):
        edition = path.stem.rpartition("_")[2]
        counts[edition if edition in counts else ""] += _fits(_lines(path))
    now, before, readings = counts.values()
    runs = [[sum(run[fit] for fit in FITS), *(run[fit] for fit in FITS)] for run in (now, before)]
    return [len(tables), published, *runs[0], *runs[1], now[""] + before[""], readings.total()]


def _fits(lines: list[dict[str, str]]) -> Counter[str]:
    """How many cells come how near; "" without a published figure, "twice" for FedProx beside FedAvg."""
    missed = {line["column"] for line in lines if line["row"] == "FedAvg" and _fit(line) == "outside"}
    twice = [line["row"] == "FedProx" and _fit(line) == "outside" and line["column"] in missed for line in lines]
    return Counter("twice" if again else _fit(line) for line, again in zip(lines, twice, strict=True))


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

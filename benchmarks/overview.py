"""How near the results come to the papers: cells run, inside the published spread, within one point, outside.

    python benchmarks/overview.py            # the table
    python benchmarks/overview.py --write    # and in results/README.md

Counted from results/*.csv of the form that `pflmpi report TABLE` writes, and the table files in configs/papers. Runs
with another reading than the table file has are in results/*_readings.csv, and counted apart.
"""

import argparse
import csv
import re
from collections import Counter
from pathlib import Path

from pflmpi.analysis.formats import closeness
from pflmpi.analysis.table import METRICS
from pflmpi.sweep.table import load

ROOT = Path(__file__).parent.parent
PAPERS = {"fedgmh": "FedGMH", "fedfcd": "FedFCD", "pfedpm": "pFedPM", "pfedcfr": "pFedCFR", "pfedafe": "pFedAFE"}
FITS = ("inside", "within a point", "outside")
BEGIN, END = "<!-- overview: benchmarks/overview.py --write -->", "<!-- end of the overview -->"


def overview(results: Path = ROOT / "results", papers: Path = ROOT / "configs" / "papers") -> str:
    """The table as Markdown, a line for each paper and one for all."""
    head = ("paper", "files", "with results", "published cells", "run", *FITS, "run, no figure published", "readings")
    lines = [(PAPERS[paper], *_counts(paper, results, papers)) for paper in PAPERS]
    lines.append(("all", *map(sum, zip(*(line[1:] for line in lines), strict=True))))
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _counts(paper: str, results: Path, papers: Path) -> list[int]:
    tables = sorted((papers / paper).glob("*.yaml"))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in results.glob("*.md"))
    shown = [path for path in tables if re.search(rf"pflmpi (sweep|report) \S*/{path.stem}\.yaml", pages)]
    published = sum(
        len(columns)
        for table in map(load, tables)
        if METRICS[table.metric].unit == "percent"
        for columns in table.published.values()
    )
    found: Counter[str] = Counter()
    for path in sorted(results.glob(f"{paper}_*.csv")):
        text = path.read_text(encoding="utf-8")
        for line in csv.DictReader(text.splitlines() if text.startswith("row,column,") else []):  # or else of rounds
            found[_fit(line) if not path.stem.endswith("_readings") else "reading"] += bool(line.get("ours"))
    run = sum(found[fit] for fit in FITS)
    return [len(tables), len(shown), published, run, *(found[fit] for fit in FITS), found[""], found["reading"]]


def _fit(line: dict[str, str]) -> str:
    if METRICS[line["metric"]].unit != "percent" or not (line["ours"] and line["published"]):
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

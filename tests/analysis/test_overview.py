"""The overview of the results agrees with their files."""

import csv
import re
from types import SimpleNamespace

import pytest

from pflmpi.analysis.table import closeness
from project import ROOT

RESULTS = ROOT / "results"
TABLES = sorted(RESULTS.glob("*.csv"))


@pytest.fixture
def overview():
    scope = {"__file__": str(ROOT / "benchmarks" / "overview.py"), "__name__": "overview"}
    exec((ROOT / "benchmarks" / "overview.py").read_text(), scope)
    return SimpleNamespace(**scope)


def test_the_page_has_the_overview_of_the_files_beside_it(overview):
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    shown = page.split(overview.BEGIN)[1].split(overview.END)[0]
    assert shown == f"\n\n{overview.overview()}\n", "python benchmarks/overview.py --write"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_fit_of_every_cell_is_that_of_its_figures(path):
    for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        expected = ""
        if line["published"] and line["ours"] and line["metric"] != "parameters":
            spread = float(line["published_spread"]) if line["published_spread"] else None
            expected = closeness(float(line["ours"]) - float(line["published"]), spread)
        assert line["fit"] == expected, line


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_is_short_and_has_a_question_and_a_date(path):
    text = path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    assert len(words) <= 700, "the notebook belongs to the commits"
    if path.stem != "README":
        assert "?" in text and re.search(r"^Measured .* 20\d\d", text, re.MULTILINE)


def test_cells_are_counted_by_one_reading_of_the_paper_and_apart_by_the_one_before_it(overview, tmp_path):
    head = "row,column,metric,figure,ours,published,published_spread\n"
    lines = ["a,c,mean,best,90,90.2,0.3", "b,c,mean,best,90,91.0,0.3", "c,c,mean,best,90,91.01,", "d,c,mean,best,90,,",
             "e,c,mean,best,,90,", "f,c,parameters,last,105.6,106,", "g,c,mean,best,90,90.5,"]  # fmt: skip
    (tmp_path / "fedgmh_table2.csv").write_text(head + "\n".join(lines) + "\n")
    readings = ["a,c; more rounds,mean,best,90,90.2,0.3", "c,c; a,mean,best,90.5,91.01,", "h,c; a,mean,best,90,90,"]
    (tmp_path / "fedgmh_table2_readings.csv").write_text(head + "\n".join(readings) + "\n")
    (tmp_path / "fedgmh_table5_earlier.csv").write_text(head + "c,c,mean,best,90,91.01,\na,c,mean,best,90,90,\n")
    table = overview.overview(results=tmp_path)
    rows = {line.split(" | ")[0][2:]: line.strip("|\n ").split(" | ")[1:] for line in table.splitlines()}
    fits = ["inside", "near", "outside"]
    assert rows["paper"][2:] == ["run", *fits, "before", *fits, "unpublished", "readings"]
    assert rows["FedGMH"] == ["8", rows["FedGMH"][1], *"4121", *"2011", "2", "3"]
    assert rows["FedFCD"][2:] == ["0"] * 10 and rows["all"][2:] == rows["FedGMH"][2:]


@pytest.mark.parametrize("fedavg, outside", [(95, "1"), (90, "1"), (None, "1")])
def test_fedprox_beside_a_fedavg_that_misses_too_is_not_a_second_miss(fedavg, outside, overview, tmp_path):
    lines = ["FedProx,c,mean,best,90,92,", *([f"FedAvg,c,mean,best,{fedavg},90,"] if fedavg else [])]
    head = "row,column,metric,figure,ours,published,published_spread\n"
    (tmp_path / "fedgmh_table2.csv").write_text(head + "\n".join(lines) + "\n")
    counted = overview.overview(results=tmp_path).splitlines()[2].split(" | ")
    assert counted[6] == outside and counted[3] == ("2" if fedavg == 90 else "1")

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


def test_cells_are_counted_once_by_how_near_they_come(overview, tmp_path):
    head = "row,column,metric,figure,ours,published,published_spread\n"
    lines = ["a,c,mean,best,90,90.2,0.3", "b,c,mean,best,90,91.0,0.3", "c,c,mean,best,90,91.01,", "d,c,mean,best,90,,",
             "e,c,mean,best,,90,", "f,c,parameters,last,105.6,106,", "g,c,mean,best,90,90.5,"]  # fmt: skip
    (tmp_path / "fedgmh_table2.csv").write_text(head + "\n".join(lines) + "\n")
    readings = ["a,c; more rounds,mean,best,90,90.2,0.3", "c,c; a; b,mean,best,90,91.01,",
                "c,c; a,mean,best,90.5,91.01,", "c,d; a,mean,best,91,91.01,", "h,c; a,mean,best,90,90,"]  # fmt: skip
    (tmp_path / "fedgmh_table2_readings.csv").write_text(head + "\n".join(readings) + "\n")
    (tmp_path / "fedgmh_table5.csv").write_text(head + "c,c,mean,best,90,91.01,\n")  # no reading of this table
    (tmp_path / "page.md").write_text("```\npflmpi sweep configs/papers/fedgmh/fedgmh_table2.yaml --seeds 1\n```\n")
    table = overview.overview(results=tmp_path)
    rows = {line.split(" | ")[0][2:]: line.strip("|\n ").split(" | ")[1:] for line in table.splitlines()}
    names = ["run", "inside", "within a point", "outside", "explained", "unpublished", "readings"]
    assert rows["paper"][3:] == names
    assert rows["FedGMH"] == ["8", "1", rows["FedGMH"][2], "5", "1", "2", "2", "1", "2", "5"]
    assert rows["FedFCD"][3:] == ["0"] * 7 and rows["all"][3:] == rows["FedGMH"][3:]


def test_cells_that_only_a_far_reading_has_stay_unexplained(overview, tmp_path):
    head = "row,column,metric,figure,ours,published,published_spread\n"
    (tmp_path / "fedgmh_table2.csv").write_text(head + "c,c,mean,best,90,91.01,\n")
    (tmp_path / "fedgmh_table2_readings.csv").write_text(head + "c,c; a,mean,best,90,91.01,\n")
    assert overview.overview(results=tmp_path).splitlines()[2].split(" | ")[7:9] == ["1", "0"]

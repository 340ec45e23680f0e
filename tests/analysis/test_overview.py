"""The overview of the results agrees with their files."""

import csv
import importlib.util
import re
import shutil
from types import SimpleNamespace

import pytest

import table_file
from pflmpi.analysis.table_text import rate_difference
from pflmpi.config.yaml_file import dump
from pflmpi.forecast.budget import Budget, config_without_seed
from pflmpi.store import config_file, metrics_file
from pflmpi.sweep.pending import CellTask
from pflmpi.sweep.table import list_cells, load
from project import ROOT

RESULTS = ROOT / "results"
TABLES = sorted(RESULTS.glob("*.csv"))


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def overview():
    return script("overview")


def test_the_pages_have_what_is_written_from_the_files_beside_them(overview):
    for path, text in overview.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: python benchmarks/overview.py --write"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_fit_of_every_cell_is_that_of_its_figures(path):
    for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        expected = ""
        if line["published"] and line["ours"] and line["metric"] not in ("parameters", "train_loss"):
            spread = float(line["published_spread"]) if line["published_spread"] else None
            expected = rate_difference(float(line["ours"]) - float(line["published"]), spread)
        assert line["fit"] == expected, line


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_is_short_and_has_a_question_and_a_date(path, overview):
    text = path.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    assert len(words) <= (600 if path.stem in overview.PAPERS else 700), "the notebook belongs to the commits"
    if path.stem != "README":
        assert "?" in text and re.search(r"^Measured .* 20\d\d", text, re.MULTILINE)


HEAD = "row,column,metric,figure,ours,published,published_spread\n"


def test_cells_are_counted_by_how_near_they_come_to_the_published_figure(overview, tmp_path):
    lines = ["a,c,mean,best,90,90.2,0.3", "b,c,mean,best,90,91.0,0.3", "c,c,mean,best,90,91.01,", "d,c,mean,best,90,,",
             "e,c,mean,best,,90,", "f,c,parameters,last,105.6,106,", "g,c,mean,best,90,90.5,"]  # fmt: skip
    (tmp_path / "fedgmh_table2.csv").write_text(HEAD + "\n".join(lines) + "\n")
    (tmp_path / "fedgmh_table2_readings.csv").write_text(HEAD + lines[0] + "\n")  # of no table
    table = overview.overview(results=tmp_path)
    rows = {line.split(" | ")[0][2:]: line.strip("|\n ").split(" | ")[1:] for line in table.splitlines()}
    assert rows["paper"][2:] == ["run", "inside", "near", "outside"]
    assert rows["FedGMH"] == ["8", rows["FedGMH"][1], *"4121"]
    assert rows["FedFCD"][2:] == ["0"] * 4 and rows["all"][2:] == rows["FedGMH"][2:]


@pytest.mark.parametrize("fedavg, outside", [(95, "1"), (90, "1"), (None, "1")])
def test_fedprox_beside_a_fedavg_that_misses_too_is_not_a_second_miss(fedavg, outside, overview, tmp_path):
    lines = ["FedProx,c,mean,best,90,92,", *([f"FedAvg,c,mean,best,{fedavg},90,"] if fedavg else [])]
    (tmp_path / "fedgmh_table2.csv").write_text(HEAD + "\n".join(lines) + "\n")
    counted = overview.overview(results=tmp_path).splitlines()[2].strip("| ").split(" | ")
    assert counted[6] == outside and counted[3] == ("2" if fedavg == 90 else "1")


@pytest.fixture
def swept(overview, tmp_path):
    """A table of a paper, its one finished cell of four in a folder of sweeps, and a folder for results."""
    for paper in overview.PAPERS:
        (tmp_path / "papers" / paper).mkdir(parents=True)
    (tmp_path / "results").mkdir()
    path = table_file.write(
        tmp_path / "papers" / "fedfcd",
        columns={"few": {}, "many": {"model": {"hidden": 5}}},
        published={"FedAvg": {"few": 80.5, "many": 80}},
    )
    of_table = list_cells(load(path), [], None)

    def add(*chosen, overrides=()):
        for cell in chosen:
            run = cell.run(tmp_path / "sweeps" / "small")
            run.mkdir(parents=True)
            metrics_file.restart(run, 0)
            for round in (1, 2):
                figures = [round, 3, f"0.8{cell.seed}"]
                metrics_file.append(run, [*figures, *[0] * (len(metrics_file.COLUMNS) - len(figures))])
            cell.config(tmp_path / "sweeps" / "small").write_text(dump(cell.raw))
            config_file.write(run, dump(cell.raw | {"recorded": {"partition": "0123456789abcdef"}}))
        overview.add(tmp_path / "sweeps", overrides, tmp_path / "results", tmp_path / "papers")
        file = tmp_path / "results" / "small.csv"
        return [*csv.DictReader(file.read_text().splitlines())] if file.exists() else []

    return SimpleNamespace(cells=of_table, add=add, folder=tmp_path)


def test_finished_cells_flow_into_the_files_and_one_of_more_seeds_stays(swept, overview):
    first, second = (cell for cell in swept.cells if (cell.row, cell.column) == ("FedAvg", "few"))
    unrelated = next(cell for cell in swept.cells if (cell.row, cell.column) == ("FedAvg", "many"))
    assert swept.add(overrides=["training.rounds=3"]) == []
    (line,) = swept.add(unrelated)
    assert (line["column"], line["ours"], line["fit"]) == ("many", "80.00", "within a point")
    assert line["state"] == "1 of 2 seeds"
    assert [line["column"] for line in swept.add(first)] == ["few", "many"], "in the order of the table"
    assert swept.add(second)[0]["seeds_finished"] == "2"
    shutil.rmtree(second.run(swept.folder / "sweeps" / "small"))
    lines = swept.add()
    assert (lines[0]["ours"], lines[0]["seeds_finished"], lines[0]["partitions"]) == ("80.50", "2", "0123456789ab")
    file = swept.folder / "results" / "small.csv"
    file.write_text(file.read_text().replace(",1,2,2,4,", ",1,2,3,4,"))  # of a seed that is not finished
    text = overview.tables_of("fedfcd", swept.folder / "results", swept.folder / "papers")
    assert "| FedAvg | 80.50±0.71 (80.50) | 80.00 (80.00) |" in text
    assert "Partitions: few 0123456789ab, many 0123456789ab." in text and "none is outside" in text
    assert "pflmpi sweep configs/papers/fedfcd/small.yaml\n" in text


def test_a_cell_that_two_tables_have_is_taken_from_the_sweep_that_has_run_it(swept):
    second_table = table_file.write(
        swept.folder, columns={"small": {"checkpoint": {"every": 2}}}, published={"FedAvg": {"small": 80}}
    )
    shutil.move(second_table, swept.folder / "papers" / "fedgmh" / "other.yaml")
    swept.add(next(cell for cell in swept.cells if cell.row == "FedAvg"))
    (line,) = csv.DictReader((swept.folder / "results" / "other.csv").read_text().splitlines())
    assert (line["row"], line["column"], line["ours"], line["seeds_finished"]) == ("FedAvg", "small", "80.00", "1")


def test_cells_with_other_settings_than_those_of_the_file_are_not_added_unless_they_are_said(swept, overview):
    changed = list_cells(load(swept.folder / "papers" / "fedfcd" / "small.yaml"), ["training.lr=0.5"], None)[0]
    assert swept.add(changed) == []
    assert len(swept.add(overrides=["training.lr=0.5"])) == 1


def test_what_is_run_next_are_the_published_cells_that_no_file_has_cheapest_first(tmp_path, monkeypatch):
    gpu_tables = script("gpu_tables")
    monkeypatch.setattr(gpu_tables, "ROOT", tmp_path)
    for name in ("results", "configs/papers/fedfcd"):
        (tmp_path / name).mkdir(parents=True)
    published = {"FedAvg": {"few": 80}, "Local": {"few": 80, "many (M)": 80}}
    table = table_file.write(tmp_path / "configs" / "papers" / "fedfcd", published=published)
    shutil.copy(table, tmp_path / "configs" / "papers" / "digits.yaml")  # of no paper
    again = table_file.write(tmp_path, published={"Local": {"many (M)": 80}})
    shutil.move(again, tmp_path / "configs" / "papers" / "fedfcd" / "with_the_same_cell.yaml")
    (tmp_path / "results" / "small.csv").write_text("row,column,seeds_finished\nFedAvg,few,2\nLocal,few,1\n")
    missing = [cell for cell, _, missing in gpu_tables.cells([], [], None) if missing]
    assert [f"{cell.row}/{cell.column}/{cell.seed}" for cell in missing] == [
        "Local/few/1", "Local/many (M)/0", "Local/many (M)/1"
    ]  # fmt: skip
    assert [missing for *_, missing in gpu_tables.cells([], [], 1)] == [False, False, True]
    assert sum(missing for *_, missing in gpu_tables.cells([table], [], None)) == 5
    tasks = [CellTask(cell, "start", 0, 2, ("run",)) for cell in missing]
    seconds = {config_without_seed(tasks[0]): 900.0, config_without_seed(tasks[1]): 90.0}
    assert gpu_tables.plan(Budget(0, 2, tasks, {}, seconds)).splitlines() == [
        "      180 s     0.03 h  small/Local/many (M)/seed0",
        "      180 s     0.05 h  small/Local/many (M)/seed1",
        "     1800 s     0.30 h  small/Local/few/seed1",
    ]

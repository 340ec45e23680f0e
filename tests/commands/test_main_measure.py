"""The main measure of a run, here an error of numbers, is what every command shows, and compares by."""

import csv
import json

import numpy as np
import pytest

import quick_run
import table_file
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.commands.progress import RunProgress, show_summary
from pflmpi.commands.search import _score
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.learning.main_measure import main_measure, summarize_rounds
from pflmpi.sweep.table import list_cells, load

ROWS = {"FedAvg": {"algorithm": {"name": "fedavg"}}, "Local": {"algorithm": {"name": "local"}}}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The runs of a table with two rows, and the table file; the rate is too large, so that later rounds are worse."""
    folder = tmp_path_factory.mktemp("sweep")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    np.savez(folder / "numbers.npz", x=x, y=x @ rng.normal(size=(4, 1)) + 1, client=np.arange(120) % 5)
    base = quick_run.settings(
        data={"name": "numbers", "path": str(folder / "numbers.npz"), "task": "regression", "validation": 0.2},
        partition={"name": "writers", "clients": None},
        model={"name": "mlp", "hidden": 8},
        training={"rounds": 4, "participation": 1.0, "batch_size": 1000, "epochs": 1, "lr": 0.6},
        evaluation={"unseen": 0.2},
    )
    base["data"].pop("limit", None)
    base.pop("seed", None), base.pop("algorithm", None)
    path = table_file.write(folder, base=base, columns={"numbers": {}}, rows=ROWS, seeds=[0], metric=None)
    for cell in list_cells(load(path), [], None):
        quick_run.run({**cell.raw, "seed": 0}, cell.run(folder / "out"))
        cell.config(folder / "out").write_text(yaml_file.dump(cell.raw))
    return path, folder / "out", list_cells(load(path), [], None)


@pytest.fixture(scope="module")
def runs(sweep):
    return [open_run(cell.run(sweep[1])) for cell in sweep[2]]


def best_of(run):
    return int(run.columns["validation_rmse_mean"].argmin())


def test_status_and_watch_show_it_with_the_best_round_that_is_the_lowest(runs, capfd):
    run, place = runs[0], best_of(runs[0])
    values = run.columns["rmse_mean"]
    assert place > 0 and values[place] < values.max(), "the highest would be another"
    assert main(["status", str(run.path)]) == 0
    best = f"rmse {values[-1]:.4f} (best {values[place]:.4f} in round {place + 1})"
    unseen = f"unseen clients {run.columns['unseen_rmse_mean'][-1]:.4f}"
    assert f"{best}, {unseen}" in capfd.readouterr().out
    assert main(["status", str(run.path), "--json"]) == 0
    (state,) = json.loads(capfd.readouterr().out)["runs"]
    figures = [state[key] for key in ("measure", "last", "best", "best_round", "accuracy_mean", "best_accuracy")]
    assert figures == ["rmse_mean", values[-1], values[place], place + 1, None, None]
    assert main(["watch", str(run.path)]) == 0
    assert f"rmse {values[-1]:.4f}" in capfd.readouterr().out


def test_a_run_shows_it_while_it_goes_and_at_its_end(runs, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "150")
    run = runs[0]
    config = configuration.parse({key: value for key, value in run.config.items() if key != "recorded"})
    show_summary(run.path, config)
    text, place = capfd.readouterr().out, best_of(run)
    values, judged = run.columns["rmse_mean"], run.columns["validation_rmse_mean"]
    assert f"{values[place]:.4f} (round {place + 1}, by validation rmse {judged[place]:.4f})" in text
    assert "last rmse, mean over clients" in text and "accuracy" not in text
    assert RunProgress(config, quiet=True, bar=False, rank=0)._score == "rmse -"


def test_runs_are_compared_by_it(runs, capfd):
    paths = [str(run.path) for run in runs]
    assert main(["compare", *paths]) == 0
    lines = {line.split("  ")[0].strip(): line for line in capfd.readouterr().out.splitlines() if line.strip()}
    assert all(f"{run.columns['rmse_mean'][best_of(run)]:.4f}" in lines["best (rmse)"] for run in runs)
    clients = [run.round().metrics["client_rmse"] for run in runs]
    assert all(f"{np.nanmax(values):.4f}" in lines["worst client (rmse)"] for values in clients)
    assert "accuracy" not in "".join(lines) and "highest 10 % (rmse)" in lines
    assert main(["compare", *paths, "--json"]) == 0
    first = json.loads(capfd.readouterr().out)["runs"][0]
    values, place = runs[0].columns["rmse_mean"], best_of(runs[0])
    assert [first[key] for key in ("measure", "best", "best_round", "last", "best_accuracy")] == [
        *("rmse_mean", pytest.approx(values[place]), place + 1, pytest.approx(values[-1]), None)
    ]


def test_a_report_draws_it_first_and_stars_the_lowest(runs, tmp_path, capfd):
    assert main(["report", *(str(run.path) for run in runs), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    titles = ["rmse over rounds", "rmse against bytes", "rmse against time"]
    assert page.index(titles[0]) < page.index(titles[1]) < page.index(titles[2])
    with open(tmp_path / "page" / "figures" / "rmse_over_rounds.csv") as file:
        marked = {line["curve"]: int(line["round"]) for line in csv.DictReader(file) if line["marked"] == "1"}
    assert marked == {run.name: best_of(run) + 1 for run in runs}
    with open(tmp_path / "page" / "runs.csv") as file:
        fedavg, local = csv.DictReader(file)
    clients = [run.round().metrics["client_rmse"] for run in runs]
    assert float(fedavg["gain over local (rmse)"]) == pytest.approx(np.nanmean(clients[1] - clients[0]), abs=1e-4)
    best = min(float(line["best (rmse)"]) for line in (fedavg, local))
    assert f'<td class="best">{best:.4f}</td>' in page


def test_a_table_without_a_metric_shows_it_and_a_search_takes_the_lowest(sweep, runs, capfd):
    path, out, of_table = sweep
    assert main(["table", str(path), "--out", str(out)]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "rmse, mean over clients, best round by validation" in text
    assert all(f"{run.columns['rmse_mean'][best_of(run)]:.4f}" in text for run in runs)
    for cell, run in zip(of_table, runs, strict=True):
        lowest = run.columns["validation_rmse_mean"].min()
        assert _score(load(path), out, cell) == (pytest.approx(lowest), pytest.approx(lowest))


def test_what_has_no_number_is_passed_over():
    lines = [{"round": "1", "auroc_mean": "nan", "accuracy_mean": "0.5", "validation_accuracy_mean": ""}]
    lines += [{"round": "2", "auroc_mean": "nan", "accuracy_mean": "0.7", "validation_accuracy_mean": "0.1"}]
    lines += [{"round": "3", "auroc_mean": "", "accuracy_mean": "", "validation_accuracy_mean": ""}]
    tested = summarize_rounds({"evaluation": {"measures": ["auroc"]}}, lines)
    assert tested.measure.name == "accuracy" and tested.judge == "validation_accuracy_mean"
    assert tested.last and tested.best and tested.last["round"] == tested.best["round"] == 2


@pytest.mark.parametrize("evaluation", [None, 5, {"measures": 5}, {"measures": {"a": 1}}])
def test_a_strangers_configuration_may_have_anything_for_measures(evaluation):
    assert main_measure({"evaluation": evaluation}, ["accuracy_mean"]).name == "accuracy"

"""What is read and drawn of a run of 20,000 clients, of which 60 have trained: counted, not timed."""

import json
import re
import shutil

import numpy as np
import pytest

import quick_run
from pflmpi.analysis import model
from pflmpi.analysis.plots import Curves, Matrices
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import choose_clients, describe_chosen_clients, name_runs
from pflmpi.analysis.series import diagnostics, similarity
from pflmpi.analysis.series.clients import plot_single_clients
from pflmpi.cli import main
from pflmpi.store import probe_file

CLIENTS, PARTICIPANTS = 20_000, 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    whose = np.repeat(np.arange(CLIENTS), 4)
    x = np.random.default_rng(0).random((len(whose), 3), np.float32)
    np.savez(folder / "data.npz", x=x, y=np.arange(len(whose)) % 3, client=whose)
    raw = quick_run.settings(
        partition={"name": "writers"},
        model={"name": "mlp", "hidden": 4},
        training={"rounds": 2, "participation": PARTICIPANTS / CLIENTS},
        evaluation={"every": 2},
        checkpoint={"keep": 0},
    )
    raw["data"] = {"path": str(folder / "data.npz")}
    quick_run.run(raw, folder / "run")
    return open_run(folder / "run")


def test_clients_of_figures_are_evenly_spaced_among_those_that_have_trained(run):
    last = run.round(2)
    trained = np.union1d(run.round(1).participants, last.participants)
    assert np.flatnonzero(last.trained).tolist() == trained.tolist() and not run.round(0).trained.any()
    assert choose_clients(last).tolist() == trained.tolist(), "fewer than there is room for"
    few = choose_clients(last, 3).tolist()
    assert few == trained[[0, round((len(trained) - 1) / 2), -1]].tolist()
    assert (
        describe_chosen_clients(last, np.array(few))
        == "3 of 20000 clients, evenly spaced among those that have trained."
    )
    assert len(choose_clients(run.round(0))) == 100, "before any has trained: over all"


def test_rows_written_between_two_rounds_are_those_of_the_participants(run):
    written = run.round(2).written_since(run.round(1))
    assert np.flatnonzero(written).tolist() == run.round(2).participants.tolist()


def test_figures_of_every_two_clients_read_a_few_clients(run, monkeypatch):
    read: list[int] = []
    states = model.read_client_states
    monkeypatch.setattr(
        similarity, "read_client_states", lambda round, ids: read.append(len(ids)) or states(round, ids)
    )
    matrices, curves = similarity.plot_cosines([run.round(number) for number in run.rounds])
    assert isinstance(matrices, Matrices) and isinstance(curves, Curves)
    assert max(read) <= 100 and matrices.panels[0].rows == choose_clients(run.round(2)).tolist()
    assert "evenly spaced among those that have trained" in matrices.caption


def test_overlaps_are_of_the_same_few_clients(run):
    plots = {plot.name: plot for plot in diagnostics.plot_diagnostics([run.round(number) for number in run.rounds])}
    overlap = plots["diagnostic-critical-overlap"]
    assert overlap.panels[0].values.shape == (len(choose_clients(run.round(2))),) * 2
    assert not np.isnan(overlap.panels[0].values).all()
    assert np.isfinite(plots["diagnostic-critical-over_rounds"].curves[0].y[1:]).all()


def test_clients_to_choose_are_those_of_the_figures(run):
    (first,) = name_runs([run])
    plots = diagnostics.plot_diagnostics([run.round(number) for number in run.rounds])
    plots += similarity.plot_cosines([run.round(number) for number in run.rounds])
    drawn = {plot.name: plot for plot in plot_single_clients([first], [plots])}
    chosen = choose_clients(run.round(2)).tolist()
    assert [curve.client for curve in drawn["client_accuracy"].curves] == chosen
    assert [curve.client for curve in drawn["client_layer_cosines"].curves] == chosen
    assert {bar[0] for bar in drawn["client_samples"].bars} == {*chosen}


def test_a_probe_is_of_clients_that_have_trained(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    assert main(["probe", str(tmp_path / "run"), "--clients", "5", "--samples", "8"]) == 0
    (layer, *_) = probe_file.read(tmp_path / "run", 2).layers.values()
    trained = np.flatnonzero(run.round(2).trained)
    assert len(layer.clients) == 5 and np.isin(layer.clients, trained).all()


def test_a_report_is_small_and_has_all_numbers_where_they_are_asked_for(run, tmp_path):
    assert main(["report", str(run.path), "--out", str(tmp_path / "a")]) == 0
    page, tables = tmp_path / "a" / "report.html", sorted((tmp_path / "a").rglob("*.csv"))
    assert page.stat().st_size < 5e6
    (charts,) = re.findall(r'id="charts">(.*?)</script>', page.read_text(), re.DOTALL)
    assert len(charts) < 1e6 and json.loads(charts)
    assert main(["report", str(run.path), "--out", str(tmp_path / "b"), "--csv"]) == 0
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "b").rglob("*.csv")}
    assert lines["partition.csv"] == 1 + 2 * 3 * CLIENTS > 100_000
    short = [path.name for path in tables if len(path.read_text().splitlines()) < lines[path.name]]
    assert short == ["partition.csv"], "a shorter table has also what is not drawn"

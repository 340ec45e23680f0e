"""Validation samples: kept out of training, measured beside the test samples, and what chooses rounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

import quick_run
from pflmpi.analysis.metrics import find_best_round
from pflmpi.analysis.run import open_run
from pflmpi.analysis.summary import by_title, summarize_run
from pflmpi.analysis.table import compute_entries, pick_value
from pflmpi.analysis.table_text import format_tables
from pflmpi.cluster.run_status import read_run_status
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment import evaluation
from pflmpi.experiment import run as experiment
from pflmpi.experiment.build import load_federation, prepare
from pflmpi.experiment.restore import reopen
from pflmpi.experiment.run import RankContext
from pflmpi.learning.early_stop import EarlyStop, EarlyStopConfig
from pflmpi.learning.main_measure import summarize_rounds
from pflmpi.store import metrics_file, run_folder
from pflmpi.sweep.table import SweepTable, list_cells
from pflmpi.testing.conformance import EXECUTORS
from pflmpi.transports.inprocess import InProcessTransport

SHARE = 0.2


def settings(**sections):
    return quick_run.settings({"data": {"validation": SHARE}}, **sections)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("algorithm", ["fedgmh", "fedavg", "perfedavg"])  # own models, one for all, adapted ones
def test_the_validation_figures_are_those_of_a_test_on_these_samples(executor, algorithm, tmp_path):
    raw = settings(
        algorithm={"name": algorithm},
        training={"rounds": 2},
        evaluation={"every": 2},
        runtime={"executor": executor, "lanes": 2},
    )
    digests = {quick_run.run(raw, tmp_path / str(ranks), ranks) for ranks in (1, 2, 3)}
    assert len(digests) == 1
    one, three = (run_folder.read_metrics(tmp_path / str(ranks), 2) for ranks in (1, 3))
    for name in one:
        if not name.startswith("seconds"):
            np.testing.assert_array_equal(one[name], three[name], err_msg=name)
    rebuilt = evaluation.replace_test_samples(reopen(tmp_path / "1", ()), "validation", None, unseen=False)
    counts = evaluation.count_trained(rebuilt, tmp_path / "1", 2, lambda *_: None)
    held_out = load_federation(configuration.parse(raw)).num_validation
    np.testing.assert_array_equal(one["validation_total"], held_out)
    np.testing.assert_array_equal(one["validation_correct"], counts.correct)
    np.testing.assert_allclose(one["validation_client_loss"], counts.mean_loss, rtol=1e-6)  # float32 in other batches
    first, second = metrics_file.read(tmp_path / "1")
    assert first["validation_accuracy_mean"] == first["accuracy_mean"] == ""
    assert float(second["validation_accuracy_mean"]) == pytest.approx(counts.mean, abs=1e-6)
    assert float(second["validation_loss"]) == pytest.approx(np.nanmean(counts.mean_loss), abs=1e-6)


def test_nothing_else_changes_where_the_samples_are_only_measured_on(tmp_path):
    """A run on the same training samples without the measuring has the same bits and test figures."""
    raw = settings()
    federation = load_federation(configuration.parse(raw))
    quick_run.run(raw, tmp_path / "with")
    config = configuration.parse(quick_run.settings())
    without = replace(federation, validation=())
    context = RankContext(InProcessTransport(), torch.device("cpu"), 2)
    experiment.run(config, tmp_path / "without", context, lambda _: None, federation=without)
    ours, plain = (run_folder.read_metrics(tmp_path / name, 3) for name in ("with", "without"))
    for name in plain:
        if not name.startswith("seconds"):
            np.testing.assert_array_equal(ours[name], plain[name], err_msg=name)
    assert not any(name.startswith("validation") for name in plain)
    assert tuple(metrics_file.read(tmp_path / "without")[0]) == metrics_file.COLUMNS
    assert (tmp_path / "without" / "partition.csv").read_text().startswith("client,class,train,test\n")


def test_a_resumed_run_has_the_same_bits_and_lines(tmp_path):
    digest = quick_run.run(settings(), tmp_path / "whole", 2)
    quick_run.run(settings(training={"rounds": 2}), tmp_path / "run", 3)
    assert quick_run.resume(tmp_path / "run", ("training.rounds=3",)) == digest
    lines = [
        [(name, text) for name, text in line.items() if "seconds" not in name and "memory" not in name]
        for folder in ("whole", "run")
        for line in metrics_file.read(tmp_path / folder)
    ]
    assert [dict(line)["validation_accuracy_mean"] for line in lines[:3]] == [
        dict(line)["validation_accuracy_mean"] for line in lines[3:]
    ]


LINES = {"accuracy_mean": [0.5, 0.9, 0.6], "validation_accuracy_mean": [0.3, 0.4, 0.7], "accuracy_std": [0.1, 0.2, 0.3]}


def test_validation_chooses_the_round_whose_test_figure_is_shown():
    columns = {name: np.array(values) for name, values in LINES.items()} | {
        "unseen_accuracy_mean": np.array([1, 2, 3.0])
    }
    assert find_best_round(columns) == 2 and find_best_round({"accuracy_mean": columns["accuracy_mean"]}) == 1
    assert pick_value(columns, "mean", "best") == 60 and pick_value(columns, "spread", "best") == 30
    assert pick_value(columns, "unseen", "best") == 300
    assert pick_value({name: columns[name] for name in ("accuracy_mean", "accuracy_std")}, "spread", "best") == 20


def test_a_round_without_a_validation_figure_is_not_chosen():
    partial = {"validation_accuracy_mean": np.array([0.3, np.nan, 0.2]), "accuracy_mean": np.array([0.5, 0.9, 0.6])}
    none = {**partial, "validation_accuracy_mean": np.full(3, np.nan)}
    untested = {**partial, "accuracy_mean": np.array([np.nan, 0.9, 0.6])}
    for columns, chosen in ((partial, 0), (none, None), (untested, 2)):
        value = math.nan if chosen is None else 100 * columns["accuracy_mean"][chosen]
        assert find_best_round(columns) == chosen and pick_value(columns, "mean", "best") == pytest.approx(
            value, nan_ok=True
        )
        lines = [dict(zip(columns, map(str, values), strict=True)) for values in zip(*columns.values(), strict=True)]
        assert summarize_rounds({}, lines).best == (
            None if chosen is None else pytest.approx({name: values[chosen] for name, values in columns.items()})
        )


def test_early_stop_watches_validation_samples_where_there_are_some():
    stop = EarlyStopConfig(metric="accuracy_mean", patience=2)
    rounds = [{"round": str(number), "accuracy_mean": f"{0.1 * number}"} for number in range(1, 4)]
    assert not EarlyStop(stop, rounds).met
    early = EarlyStop(stop, [{**line, "validation_accuracy_mean": "0.5"} for line in rounds])
    assert early.met and early.why.startswith("validation_accuracy_mean has not improved on 0.5 of round 1")


def test_unseen_clients_choose_no_round_where_validation_samples_do():
    raw = settings(evaluation={"unseen": 0.3}, training={"stop": {"metric": "unseen_accuracy_mean", "patience": 2}})
    with pytest.raises(ConfigError, match="rounds are chosen by validation samples, and unseen clients have none"):
        prepare(configuration.parse(raw), torch.device("cpu"))


def test_unseen_clients_do_not_train_on_their_validation_samples_either(tmp_path):
    raw = settings(evaluation={"unseen": 0.3}, training={"rounds": 1})
    division = prepare(configuration.parse(raw), torch.device("cpu")).division
    everyone = division.everyone
    assert len(everyone.validation) == 7 and len(division.trained.validation) == 5
    for train, validation in zip(everyone.train, everyone.validation, strict=True):
        assert len(validation) and not np.intersect1d(train, validation).size
    digest = quick_run.run(raw, tmp_path / "run")
    assert quick_run.run(raw, tmp_path / "three", 3) == digest
    assert len(run_folder.read_metrics(tmp_path / "run", 1)["validation_total"]) == 5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validation") / "run"
    quick_run.run(settings(training={"rounds": 4}), folder)
    return folder


def test_what_shows_a_run_shows_the_round_that_validation_chose(run, capsys):
    opened = open_run(run)
    chosen = int(opened.columns["validation_accuracy_mean"].argmax())
    line = by_title(summarize_run(opened))
    assert line["in round"] == chosen + 1 and line["best (%)"] == 100 * opened.columns["accuracy_mean"][chosen]
    assert line["validation (%)"] == 100 * opened.columns["validation_accuracy_mean"][chosen]
    status = read_run_status(run)
    assert status and status.best and status.best[1] == chosen + 1
    table = opened.clients_table([4])
    assert (table["validation_samples"] == opened.counts.validation.sum(1)).all()
    assert set(table.columns) >= {"validation_correct", "validation_accuracy", "validation_loss", "validation_f1"}


def test_evaluate_tests_on_validation_samples_as_the_run_did(run, capsys):
    assert quick_run.command(["evaluate", str(run), "--split", "validation"]) == 0
    assert "the run recorded the same accuracy for every client" in capsys.readouterr().out
    assert quick_run.command(["evaluate", str(run), "--split", "validation", "--data", "digits"]) == 2


def test_evaluate_says_that_there_are_none(tmp_path, capfd):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "--split", "validation"]) == 2
    assert "has no validation samples (data.validation)" in " ".join(capfd.readouterr().err.split())


def test_a_report_puts_the_round_that_validation_chose_first(run, tmp_path, capsys):
    assert quick_run.command(["report", str(run), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "by validation accuracy, where a run has that" in page and "validation samples" in page


def test_a_table_says_what_chose_its_rounds(tmp_path):
    raw = settings(training={"rounds": 2})
    table = SweepTable.model_validate(
        {"title": "t", "source": "none", "seeds": [3], "columns": {"c": raw_of(raw)}, "rows": {"r": {}}}
    )
    (cell,) = list_cells(table, [], None)
    quick_run.run(raw, cell.run(tmp_path))
    cell.config(tmp_path).write_text(yaml.safe_dump(cell.raw))
    filled = compute_entries(table, [cell], tmp_path)
    assert filled[0].by_validation and "best round by validation, percent" in format_tables(table, filled)[0].caption
    for metric in ("train_loss", "parameters"):
        retargeted = table.model_copy(update={"metric": metric})
        filled = compute_entries(retargeted, [cell], tmp_path)
        assert not filled[0].by_validation and "validation" not in format_tables(retargeted, filled)[0].caption


def raw_of(raw):
    return {name: value for name, value in raw.items() if name != "seed"}

"""Measures by name or of one's own: formulas against scikit-learn, and where they are read."""

import csv
import warnings

import numpy as np
import pytest
import sklearn.metrics as oracle

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series.accuracy import plot_further_measures, plot_main_measure
from pflmpi.analysis.table import pick_value
from pflmpi.errors import ConfigError
from pflmpi.learning.measures import MEASURES
from pflmpi.runtime.counts import Counts, compute_metrics
from pflmpi.store import metrics_file, run_folder
from pflmpi.sweep.table import SweepTable

RNG = np.random.default_rng(0)


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum(1, keepdims=True)


@pytest.mark.parametrize("size, classes", [(1, 3), (40, 2), (200, 5)])
def test_measures_of_classes_are_those_of_scikit_learn(size, classes):
    scores, labels = RNG.normal(size=(size, classes)).round(1), RNG.integers(0, classes, size)
    labels[labels == classes - 1] = 0  # a class that no sample is of
    chosen, likely = scores.argmax(1), softmax(scores)
    areas = [oracle.roc_auc_score(labels == k, likely[:, k]) for k in range(classes) if 0 < (labels == k).sum() < size]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that is predicted and not there
        expected = {
            "accuracy": oracle.accuracy_score(labels, chosen),
            "balanced_accuracy": oracle.balanced_accuracy_score(labels, chosen),
            "f1_macro": oracle.f1_score(labels, chosen, average="macro"),
            "auroc": np.mean(areas) if areas else np.nan,
            "perplexity": np.exp(oracle.log_loss(labels, likely, labels=np.arange(classes))),
        }
    for name, value in expected.items():
        np.testing.assert_allclose(MEASURES[name](scores, labels), value, rtol=1e-9, err_msg=name)


def test_measures_of_several_labels_are_shares_of_labels_and_leave_out_what_is_not_there():
    scores, labels = RNG.normal(size=(50, 4)), RNG.integers(0, 2, (50, 4)).astype(np.float32)
    labels[:, 3] = 0
    chosen = scores > 0
    f1 = oracle.f1_score(labels, chosen, average="macro", zero_division=0)
    assert MEASURES["accuracy"](scores, labels) == pytest.approx(1 - oracle.hamming_loss(labels, chosen))
    assert MEASURES["f1_macro"](scores, labels) == pytest.approx(f1)
    more = np.c_[scores, -np.ones(50)], np.c_[labels, np.zeros(50)]  # for which scikit-learn counts 0
    assert MEASURES["f1_macro"](*more) == pytest.approx(f1)
    assert MEASURES["auroc"](scores, labels) == pytest.approx(oracle.roc_auc_score(labels[:, :3], scores[:, :3]))


def test_measures_of_numbers_are_those_of_scikit_learn():
    scores, labels = RNG.normal(size=(30, 2)), RNG.normal(size=(30, 2))
    assert MEASURES["mae"](scores, labels) == pytest.approx(oracle.mean_absolute_error(labels, scores))
    assert MEASURES["rmse"](scores, labels) == pytest.approx(np.sqrt(oracle.mean_squared_error(labels, scores)))
    assert MEASURES["r2"](scores, labels) == pytest.approx(oracle.r2_score(labels, scores))
    assert np.isnan(MEASURES["r2"](scores[:1], labels[:1])), "one sample has no variance"


def test_the_calibration_error_is_that_of_its_definition():
    scores, labels = 3 * RNG.normal(size=(300, 3)), RNG.integers(0, 3, 300)
    confidence, right = softmax(scores).max(1), scores.argmax(1) == labels
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence >= low) & (confidence < low + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert MEASURES["calibration_error"](scores, labels) == pytest.approx(expected)


def test_the_worst_tenth_has_the_highest_errors_and_the_lowest_scores():
    total = np.array([[1], [3], [0]])
    values = {"rmse": np.array([1.0, 2.0, np.nan]), "auroc": np.array([0.5, 1.0, np.nan])}
    metrics = compute_metrics(Counts(total, total, total, np.zeros(3), values))
    assert (metrics["rmse_mean"], metrics["rmse_weighted"], metrics["rmse_bottom"]) == (1.5, 7 / 4, 2.0)
    assert (metrics["auroc_mean"], metrics["auroc_weighted"], metrics["auroc_bottom"]) == (0.75, 3.5 / 4, 0.5)


def test_infinities_of_both_signs_have_the_worse_one_as_their_mean():
    total, values = np.ones((3, 1), np.int64), np.array([np.inf, 1.0, -np.inf])
    metrics = compute_metrics(Counts(total, total, total, np.zeros(3), {"log_odds": values, "mse": values}))
    assert [metrics[f"log_odds_{column}"] for column in ("mean", "weighted", "bottom")] == [-np.inf] * 3
    assert [metrics[f"mse_{column}"] for column in ("mean", "weighted", "bottom")] == [np.inf] * 3


OWN = """
import numpy as np

def share_of_first(scores, labels):
    return (scores.argmax(1) == 0).mean()

def broken(scores, labels):
    return scores[labels.max() + 10**6, 0]

def f1(scores, labels):
    return 0.0

unseen_accuracy = client_gap = error_mean = correct = loss = f1

def tiny_error(scores, labels):
    return 1.25e-9

def odd(a, b):
    return 0.0

RNG = np.random.default_rng(1)

def resampled(scores, labels):
    drawn = RNG.integers(0, len(labels), len(labels))
    return (scores[drawn].argmax(1) == labels[drawn]).mean()

def undefined(scores, labels):
    return np.nan
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:share_of_first"


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_they_are_measured_alike_on_any_ranks_and_after_a_resume(executor, own, tmp_path):
    raw = quick_run.settings(
        algorithm={"name": "fedper"},
        training={"rounds": 3, "participation": 0.5},
        evaluation={"measures": ["auroc", "accuracy", own], "unseen": 0.3, "when": "both"},
        runtime={"executor": executor, "lanes": 2},
    )
    digest = quick_run.run(raw, tmp_path / "one")
    assert quick_run.run(raw, tmp_path / "three", 3) == digest
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "begun")
    assert quick_run.resume(tmp_path / "begun", ("training.rounds=3",), ranks=2) == digest
    one, three, resumed = (metrics_file.read(tmp_path / name) for name in ("one", "three", "begun"))
    measures = [name for name in one[0] if "auroc" in name or "share_of_first" in name]
    assert measures == [
        *("auroc_mean", "auroc_weighted", "auroc_bottom"),
        *("share_of_first_mean", "share_of_first_weighted", "share_of_first_bottom"),
        *("unseen_auroc_mean", "unseen_share_of_first_mean"),
        *("trained_auroc_mean", "trained_share_of_first_mean"),
    ]
    for line, three_line, again in zip(one, three, resumed, strict=True):
        assert all(line[name] and line[name] == three_line[name] == again[name] for name in measures)
    arrays = run_folder.read_metrics(tmp_path / "one", 3)
    assert float(one[2]["auroc_mean"]) == pytest.approx(np.nanmean(arrays["client_auroc"]), abs=1e-6)
    classes = arrays["predicted"][:, 0] / arrays["total"]
    np.testing.assert_allclose(arrays["client_share_of_first"], classes)
    assert "client_accuracy" not in arrays, "a run of classes has its accuracy already"


def test_small_values_keep_their_digits(own, tmp_path):
    measures = [own.replace("share_of_first", "tiny_error")]
    quick_run.run(quick_run.settings(training={"rounds": 1}, evaluation={"measures": measures}), tmp_path / "run")
    (line,) = metrics_file.read(tmp_path / "run")
    assert [line[f"tiny_error_{of}"] for of in ("mean", "weighted", "bottom")] == 3 * ["1.25e-09"]
    assert open_run(tmp_path / "run").columns["tiny_error_mean"] == [1.25e-9]


def test_without_them_a_run_has_its_usual_columns(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path)
    assert tuple(metrics_file.read(tmp_path)[0]) == metrics_file.COLUMNS


def test_pages_tables_evaluations_and_early_stops_have_them(tmp_path, capsys):
    measured = {"evaluation": {"measures": ["auroc", "calibration_error"]}}
    raw = quick_run.settings(measured, training={"rounds": 9, "stop": {"metric": "auroc_mean", "patience": 2}})
    raw["training"]["stop"]["min_delta"] = 1.0  # more than an area can gain
    quick_run.run(raw, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert len(run.columns["round"]) == 3 and "auroc_mean has not improved" in run.stopped_early
    drawn = {
        plot.name: plot for plot in (plot_main_measure(name_runs([run])), *plot_further_measures(name_runs([run])))
    }
    assert (
        "lower values" in drawn["calibration_error_mean_over_rounds"].caption and "accuracy_mean_over_rounds" in drawn
    )
    assert drawn["auroc_over_rounds"].curves[0].y.tolist() == run.columns["auroc_mean"].tolist()
    assert pick_value(run.columns, "auroc_mean", "best") == run.columns["auroc_mean"].max()
    assert pick_value(run.columns, "calibration_error_mean", "best") == run.columns["calibration_error_mean"].min()
    assert run.clients_table()["auroc"].notna().any()
    assert quick_run.command(["evaluate", str(tmp_path / "run"), "-o", str(tmp_path / "clients.csv")]) == 0
    assert f"{run.columns['auroc_mean'][-1]:.4f}" in capsys.readouterr().out
    with open(tmp_path / "clients.csv") as file:
        lines = list(csv.DictReader(file))
    np.testing.assert_allclose([float(line["auroc"] or "nan") for line in lines], run.round().metrics["client_auroc"])


def test_a_table_may_show_a_measure():
    cells = {"columns": {"a": {}}, "rows": {"b": {}}, "seeds": [0], "title": "t", "source": "s"}
    assert SweepTable(metric="auroc_mean", **cells).metric == "auroc_mean"
    with pytest.raises(ValueError, match="must be one of mean, weighted"):
        SweepTable(metric="nonsense", **cells)


@pytest.mark.parametrize(
    "measures, says",
    [
        (["auroz"], "unknown measure 'auroz'; did you mean 'auroc'?"),
        (["auroc", "auroc"], "give each measure a name of its own"),
        *(
            ([f"{{own}}:{name}"], "give each measure a name of its own")
            for name in ("f1", "unseen_accuracy", "client_gap", "error_mean", "correct", "loss")
        ),
        (["{own}:odd"], r"expected a function f\(scores, labels\)"),
        (["{own}:broken"], "own.py:.*, in broken: IndexError"),
        (["{own}:undefined", "{own}:resampled"], "resampled has other values of the same scores.*default_rng"),
        (["mae"], "mae"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_the_start(measures, says, own, tmp_path):
    names = [name.format(own=own.partition(":")[0]) for name in measures]
    with pytest.raises(ConfigError, match=says):
        quick_run.run(quick_run.settings(evaluation={"measures": names}), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("metric, says", [("auroc_mean", "see evaluation.measures"), ("auroc", "must be one of")])
def test_an_early_stop_by_what_is_not_measured_is_refused(metric, says, tmp_path):
    raw = quick_run.settings(training={"stop": {"metric": metric, "patience": 2}})
    with pytest.raises(ConfigError, match=says):
        quick_run.run(raw, tmp_path)

"""What a page shows of several runs together, and what it leaves out because it would mislead."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pflmpi.analysis import figures
from pflmpi.analysis.comparable import group_by_seed
from pflmpi.analysis.figures import make_multiples
from pflmpi.analysis.plots import Cloud, Curve, Curves, Matrices, Missing, Multiples, Panel
from pflmpi.analysis.run import Run
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series import accuracy, cost, diagnostics
from pflmpi.analysis.series.partition import plot_partitions, sort_by_class
from pflmpi.analysis.summary import RUN, SEEDS, Column, average_seeds
from pflmpi.learning.diagnostics import ClassVectors
from pflmpi.store import partition_file
from pflmpi.store.partition_file import SampleCounts


def run(folder, seed, name="fedavg", **training):
    made = Run(folder, {"seed": seed, "algorithm": {"name": name}, "training": training}, name)
    made.__dict__["columns"] = {"round": np.arange(1, 3)}  # which has no files
    return made


def figure(among, values, percent=True):
    x = np.arange(1, 1 + max(map(len, values)))
    curves = tuple(
        Curve(named.legend, x[: len(y)], np.array(y, float), mark=0, style=named.style, source=named.label)
        for named, y in zip(among, values, strict=True)
    )
    words = {"name": "a", "title": "A", "caption": "All.", "x_label": "round", "y_label": "accuracy"}
    return Curves(curves=curves, percent=percent, **words)


def test_runs_that_differ_in_the_seed_alone_are_one_curve_with_its_confidence_interval(tmp_path):
    runs = [run(tmp_path / "0", 0), run(tmp_path / "1", 1), run(tmp_path / "x", 0, "local")]
    plot = figure(name_runs(runs), [[40, 90, 99], [42, 96], [50, 60, 70]])
    merged = accuracy.merge_seeds(plot, name_runs(runs))
    assert isinstance(merged, Curves) and [curve.label for curve in merged.curves] == ["fedavg, 2 seeds", "local"]
    mean = merged.curves[0]
    assert mean.y.tolist() == [41, 93] and mean.x.tolist() == [1, 2] and mean.mark == 1
    half = 12.7062 * np.array([1.0, 3.0])  # t of one degree of freedom, times the standard error of two
    assert mean.low is not None and mean.low == pytest.approx([41 - half[0], 93 - half[1]], abs=1e-3)
    assert mean.high is not None and mean.high == pytest.approx([41 + half[0], 100], abs=1e-3), "not above 100 %"
    assert "their mean, with its 95 % confidence interval" in merged.caption
    assert merged.caption.endswith(" as a band, at the points that all have.")


def test_a_seed_without_rounds_stands_alone_and_others_are_averaged_up_to_the_round_that_all_have(tmp_path):
    runs = [run(tmp_path / f"{seed}", seed) for seed in range(3)]
    for seed_run, count in zip(runs, (0, 3, 2), strict=True):
        vars(seed_run)["columns"] = {"round": np.arange(1, 1 + count), "seconds": np.ones(count)}
    begun, waiting = group_by_seed(name_runs(runs))
    assert (len(begun.runs), len(waiting.runs)) == (2, 1)
    assert cost.average_columns(begun)["seconds"].tolist() == [1, 1]
    ends = [{RUN: "fedavg", Column("last"): value} for value in (np.nan, 3.0, 2.0)]
    line, _ = average_seeds(name_runs(runs), ends)
    assert (line[SEEDS], line[Column("last")]) == (2, 2.5)


def test_a_panel_of_several_seeds_has_the_means_of_their_clients_and_says_how_many(tmp_path):
    runs = [run(tmp_path / "x" / "0", 0), run(tmp_path / "x" / "1", 1), run(tmp_path / "y", 0, "local")]
    for place, seed_run in enumerate(runs):
        columns = {"round": np.array([1, 2]), "accuracy_mean": np.array([0.1, 0.2 * (place + 1)])}
        columns |= {"up_bytes": np.array([1024, 2048 * place]), "down_bytes": np.zeros(2, int)}
        columns |= {"wire_up_bytes": np.zeros(2, int), "wire_down_bytes": np.zeros(2, int)}
        columns |= {"seconds": np.ones(2), "exchange_seconds": np.zeros(2)}
        clients = {1: np.array([0.1, 0.1]), 2: np.array([0.2, 0.2]) * (place + 1)}
        vars(seed_run).update(columns=columns, _accuracies=clients)
    groups = group_by_seed(name_runs(runs))
    assert [group.title for group in groups] == ["fedavg, 2 seeds", "local"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "read_main_by_round", lambda seed_run, _: vars(seed_run)["_accuracies"])
        (plot,) = accuracy.plot_bands(groups, 1)
    ((label, part),) = plot.parts
    assert (
        isinstance(part, Curves) and label == "fedavg, 2 seeds" and part.curves[0].y.tolist() == [10, pytest.approx(30)]
    )
    assert part.curves[0].low == pytest.approx([10, 30]) and plot.caption.endswith("Not drawn: local.")
    alone, *_ = figures.make_round_figures(groups[:1])
    assert alone.title == "Bytes per round: fedavg, 2 seeds", "not those of one seed"
    sent, *_ = figures.make_round_figures(groups)
    assert isinstance(sent, Multiples) and [label for label, _ in sent.parts] == ["fedavg, 2 seeds", "local"]
    assert [part.curves[0].y.tolist() for _, part in sent.parts if isinstance(part, Curves)] == [[1, 1], [1, 4]]


def test_seeds_of_which_one_has_an_infinite_loss_have_no_interval_there(tmp_path):
    runs = name_runs([run(tmp_path / "0", 0), run(tmp_path / "1", 1)])
    merged = accuracy.merge_seeds(figure(runs, [[np.inf, 2.0], [1.0, 4.0]], percent=False), runs)
    assert isinstance(merged, Curves)
    mean = merged.curves[0]
    assert mean.y.tolist() == [np.inf, 3.0] and mean.low is not None and np.isfinite(mean.low).tolist() == [False, True]


def test_seeds_are_averaged_in_the_rounds_that_all_were_tested_in(tmp_path):
    runs = name_runs([run(tmp_path / "0", 0), run(tmp_path / "1", 1)])
    for named_run, means in zip(runs, ([0.2, 0.4, 0.6], [np.nan, 0.6, 0.8]), strict=True):
        columns = {"round": np.array([2, 4, 8]), "accuracy_mean": np.array(means), "seconds": np.array([1, 2, 4])}
        vars(named_run.run)["columns"] = columns
    for plot, x in ((accuracy.plot_main_measure(runs), [4, 8]), (cost.plot_against_seconds(runs), [3, 7])):
        merged = accuracy.merge_seeds(plot, runs)
        assert isinstance(merged, Curves) and len(merged.curves) == 1
        assert merged.curves[0].x.tolist() == x and merged.curves[0].y == pytest.approx([50, 70])
        assert merged.curves[0].mark == 1


def test_runs_that_differ_in_more_or_were_tested_in_other_rounds_stay_apart(tmp_path):
    runs = name_runs([run(tmp_path / "0", 0, lr=0.1), run(tmp_path / "1", 1, lr=0.2)])
    plot = figure(runs, [[40, 90], [42, 96]])
    assert accuracy.merge_seeds(plot, runs) is plot
    alike = name_runs([run(tmp_path / "0", 0), run(tmp_path / "1", 1)])
    plot = figure(alike, [[40, 90], [42, 96]])
    later = replace(plot.curves[1], x=np.array([3, 4]))
    assert len(accuracy.merge_seeds(replace(plot, curves=(plot.curves[0], later)), alike).curves) == 2


def test_deviations_do_not_leave_the_scale(tmp_path):
    config = {"training": {"rounds": 2}}
    columns = {"round": np.array([1, 2]), "accuracy_mean": np.array([0.1, 0.95]), "accuracy_std": np.array([0.3, 0.2])}
    opened = Run(tmp_path, config, "a")
    opened.__dict__["columns"] = columns
    plot = accuracy.plot_main_measure(name_runs([opened]))
    assert isinstance(plot, Curves)
    low, high = (curve.y.tolist() for curve in plot.curves[1:])
    assert low == pytest.approx([0, 75]) and high == pytest.approx([40, 100])


@pytest.mark.parametrize(("spread", "equal"), [(1e-9, True), (1e-3, False)])
def test_weights_that_differ_by_rounding_alone_are_said_to_be_equal(spread, equal):
    values = 0.01 + spread * np.arange(9.0).reshape(3, 3)
    values[np.diag_indices(3)] = 0.9
    panel = Panel("round 3", values, range(3), range(3))
    value = diagnostics.find_only_value((panel,), hide_diagonal=True)
    assert (value is not None) == equal and (not equal or value == pytest.approx(0.01))
    assert diagnostics.find_only_value((panel,), hide_diagonal=False) is None


@pytest.mark.parametrize(("count", "figures"), [(49, 1), (50, 2)])
def test_few_class_vectors_have_no_t_sne(count, figures, monkeypatch):
    points, classes = np.random.default_rng(0).normal(size=(count, 3)), np.arange(count) % 10
    class_means = Cloud("round 1", points, classes, np.full(count, -1))
    monkeypatch.setattr(diagnostics, "read_known_vectors", lambda *_: class_means)
    monkeypatch.setattr(diagnostics, "tsne", lambda values: values[:, :2])
    plots = diagnostics.plot_projections([SimpleNamespace(class_names=[])] * 2, "a", ClassVectors(title="Class means"))
    assert len(plots) == figures


def pairs(name, values):
    """A matrix over all pairs of clients."""
    clients = list(range(len(values)))
    panel = Panel("", values, clients, clients)
    words = {"row_label": "client", "column_label": "client", "value_label": "v", "title": "A", "caption": "Pairs."}
    return Matrices(name=name, panels=(panel,), **words)


def test_clients_with_one_main_class_are_side_by_side(tmp_path):
    train = np.array([[0, 9], [9, 1], [1, 9], [9, 0]])
    partition_file.write(tmp_path, SampleCounts(train, train))
    matrix = pairs("a", np.arange(16.0).reshape(4, 4))
    sorted_plot = sort_by_class(matrix, Run(tmp_path, {}, "a"))
    assert isinstance(sorted_plot, Matrices)
    (panel,) = sorted_plot.panels
    assert panel.rows == panel.columns == [1, 3, 0, 2] and panel.values[0].tolist() == [5, 7, 4, 6]
    unsorted = replace(matrix, column_label="class")
    assert sort_by_class(unsorted, Run(tmp_path, {}, "a")) is unsorted


def test_clients_of_a_single_class_are_no_part_of_the_overlap_of_choices(tmp_path):
    train = np.array([[0, 9], [9, 1], [1, 9]])
    partition_file.write(tmp_path, SampleCounts(train, train))
    matrix = replace(pairs("critical", np.arange(9.0).reshape(3, 3)), choices=True)
    sorted_plot = sort_by_class(matrix, Run(tmp_path, {}, "a"))
    assert isinstance(sorted_plot, Matrices) and sorted_plot.panels[0].rows == [1, 2]
    assert sorted_plot.panels[0].values.tolist() == [[4, 5], [7, 8]] and "are left out (0)" in sorted_plot.caption
    without_choices = sort_by_class(replace(matrix, choices=False), Run(tmp_path, {}, "a"))
    assert isinstance(without_choices, Matrices) and without_choices.panels[0].rows == [1, 0, 2]


def test_the_same_figures_of_several_runs_have_one_scale_and_one_colour_for_each_label():
    x = np.array([1, 2])
    words = {"title": "T", "x_label": "round", "y_label": "mean cosine"}

    def cosines(caption, **values):
        curves = tuple(Curve(name, x, x * value, style=i) for i, (name, value) in enumerate(values.items()))
        return Curves(name="layer_cosines_over_rounds", caption=caption, curves=curves, **words)

    beta = Matrices(
        name="beta",
        title="B",
        caption="B.",
        row_label="client",
        column_label="round",
        value_label="beta",
        panels=(Panel("", np.full((2, 2), 0.25), range(2), [1, 2]),),
    )
    beta_of_b = replace(beta, panels=(Panel("", np.full((2, 2), 0.75), range(2), [1, 2]),))
    runs = [("a", [cosines("Mean. Few.", body=1, head=2), beta]), ("b", [cosines("Mean.", head=9), beta_of_b])]
    together, rest = make_multiples([*runs, ("c", [Missing("x", "y")])])
    assert [plot.name for plot in together] == ["layer_cosines_over_rounds_of_runs", "beta_of_runs"]
    assert [len(figures) for figures in rest] == [0, 0, 1] and together[0].caption == "Mean. a: Few."
    first, second = (part for _, part in together[0].parts)
    assert isinstance(first, Curves) and isinstance(second, Curves)
    assert [curve.style for curve in first.curves] == [0, 1] and second.curves[0].style == 1, "head, in both"


def test_each_partition_is_shown_once_with_the_runs_that_have_it(tmp_path):
    def with_counts(folder, first):
        item = run(tmp_path / folder, 0)
        partition_file.write(item.path, SampleCounts(np.array([[first, 1]]), np.array([[0, 1]])))
        return item

    (item,) = plot_partitions(name_runs([with_counts("a", 3), with_counts("b", 3)]), 1)
    assert isinstance(item, Matrices) and (item.name, item.title) == ("partition", "The partition")
    runs = name_runs([with_counts("a", 3), with_counts("b", 3), with_counts("c", 4), run(tmp_path / "d", 0)])
    shown, third, none = plot_partitions(runs, 3)
    a, b, c, d = (item.label for item in runs)
    assert isinstance(shown, Matrices) and (shown.name, shown.title) == ("partition", f"The partition of {a}, {b}")
    assert isinstance(third, Matrices) and (third.name, third.title) == ("partition", f"The partition of {c}")
    assert third.panels[0].values[0, 0] == 4
    assert isinstance(none, Missing) and none.title == f"The partition of {d}"
    first, *rest = plot_partitions(runs, 1)
    assert first.title == shown.title, "others differ that are not shown"
    assert [(type(item), item.title) for item in rest] == [
        (Missing, f"The partition of {item.label}") for item in runs[2:]
    ], "and are named"

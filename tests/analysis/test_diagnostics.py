"""Diagnostics, drawn by kind from what the checkpoints say: of an algorithm that the package does not know."""

import numpy as np
import pytest

import newcomer
import quick_run
from every_algorithm import every_algorithm
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm
from pflmpi.analysis.plots import Clouds, Curves, Matrices, Missing, Plot
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import pick_first_middle_last
from pflmpi.analysis.series import diagnostics
from pflmpi.learning.diagnostics import ClassVectors, ClientWeights, EntryShare, PerClient

CASES = {
    case: sections
    for case, sections in every_algorithm().items()
    if ALGORITHMS[sections["algorithm"]["name"]].diagnostics is not Algorithm.diagnostics
}


@pytest.fixture(scope="module", autouse=True)
def few_points():
    """t-SNE of the few class vectors that these runs have, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "_FEWEST_POINTS", 4)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three rounds with all its checkpoints; the algorithm is not registered any more when it is read."""
    folder = tmp_path_factory.mktemp("newcomer") / "run"
    with pytest.MonkeyPatch.context() as patch:
        raw = quick_run.settings(algorithm=newcomer.registered(patch), checkpoint={"keep": 0})
        quick_run.run(raw, folder, ranks=2)
    yield open_run(folder)


def checkpoints(run):
    return [run.round(number) for number in run.rounds]


@pytest.fixture(scope="module")
def drawn(run):
    """The figures of the run by name, without what all names begin with."""
    plots = diagnostics.plot_diagnostics(checkpoints(run))
    assert not [plot for plot in plots if isinstance(plot, Missing)]
    return {plot.name.removeprefix("diagnostic-"): plot for plot in plots if not isinstance(plot, Missing)}


def matrix(plot):
    assert isinstance(plot, Matrices), plot
    return plot


def same(actual, expected):
    return bool(np.array_equal(actual, expected.astype(np.float64), equal_nan=True))


def test_every_diagnostic_has_its_figures_with_the_titles_and_units_of_the_file(drawn):
    assert list(drawn) == [
        "trust",
        "distance",
        "team",
        "picked-over_rounds",
        "picked-overlap",
        "friends",
        "liking",
        "closeness",
        "class_points-pca",
        "class_points-tsne",
    ]
    assert (drawn["trust"].title, drawn["trust"].caption) == ("Trust", "Trust in itself. An empty cell: not known.")
    assert matrix(drawn["distance"]).value_label == "distance (m)" and matrix(drawn["trust"]).value_label == "trust"


# --- one number per client ----------------------------------------------------------------------------------------


def test_numbers_that_clients_keep_are_drawn_once_they_are_known(run, drawn):
    plot = matrix(drawn["trust"])
    (panel,) = plot.panels
    assert panel.columns == [0, 1, 2, 3] and panel.values.shape == (7, 4) and np.isnan(panel.values[:, 0]).all()
    assert plot.limits == (0.0, 1.0)
    for place, state in enumerate(checkpoints(run)):
        seen = np.asarray(state.clients["seen"])
        assert same(panel.values[:, place], np.where(seen, np.asarray(state.clients["trust"]), np.nan))
    assert not np.isnan(panel.values[:, 3]).all()


def test_measured_numbers_are_those_of_the_participants(run, drawn):
    (panel,) = matrix(drawn["distance"]).panels
    for place, state in enumerate(checkpoints(run)):
        expected = np.full(7, np.nan)
        if place:
            expected[np.sort(state.metrics["participants"])] = state.measured["distance"]
        assert same(panel.values[:, place], expected)
    assert np.isnan(panel.values[:, 3]).any()


def test_categories_of_the_server_are_empty_for_who_has_none(run, drawn):
    plot = matrix(drawn["team"])
    team = run.round(3).server["team"]
    assert plot.categories == ("0", "1", "2") and same(plot.panels[0].values[:, 3], np.where(team < 0, np.nan, team))
    assert np.isnan(plot.panels[0].values[:, 0]).all()


# --- shares of entries --------------------------------------------------------------------------------------------


def test_overlap_is_both_over_either():
    chosen = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], bool)
    assert diagnostics.compute_jaccard(chosen[0], chosen[1]) == 0.25
    overlaps = diagnostics.compute_overlaps(chosen)
    assert overlaps[:2, :2].tolist() == [[1.0, 0.25], [0.25, 1.0]] and np.isnan(overlaps[2]).all()


def test_shares_and_overlaps_are_over_all_arrays_of_a_client(run, drawn):
    def entries(number):
        clients = run.round(number).clients
        return np.concatenate([np.asarray(clients[f"picked/{name}"]).reshape(7, -1) for name in ("bias", "weight")], 1)

    curves = drawn["picked-over_rounds"]
    assert isinstance(curves, Curves)
    share, before, across = (curve.y for curve in curves.curves)
    second, third = entries(2), entries(3)
    trained = third.any(1)
    assert np.isnan(share[0]) and share[3] == pytest.approx(100 * third[trained].mean())
    again = [n for n in range(7) if second[n].any() and (second[n] != third[n]).any()]
    by_hand = [(second[n] & third[n]).sum() / (second[n] | third[n]).sum() for n in again]
    assert again and before[3] == pytest.approx(100 * np.mean(by_hand)) and np.isnan(before[0])
    overlap = matrix(drawn["picked-overlap"]).panels[0].values
    pairs = overlap[np.ix_(trained, trained)][np.triu_indices(trained.sum(), 1)]
    assert across[3] == pytest.approx(pairs.mean()) and np.isnan(overlap[~trained]).all()


# --- weights of clients -------------------------------------------------------------------------------------------


def test_measured_weights_are_those_of_the_participants_without_their_own(run, drawn):
    plot = matrix(drawn["closeness"])
    assert [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"] and plot.hide_diagonal
    for number, panel in enumerate(plot.panels, 1):
        participants = np.sort(run.round(number).metrics["participants"]).tolist()
        assert panel.rows == panel.columns == participants
        assert same(panel.values, run.round(number).measured["closeness"])
    assert "The diagonal, a client's own weight, is not drawn; it is between 1 and 1." in plot.caption


def test_weights_that_clients_keep_stand_at_those_whose_they_are(run, drawn):
    plot = matrix(drawn["friends"])
    assert not plot.hide_diagonal and plot.limits == (0.0, 1.0)
    for number, panel in enumerate(plot.panels, 1):
        state = run.round(number)
        participants = np.sort(state.metrics["participants"]).tolist()
        friends = {client: (client + 2) % 7 for client in participants}
        absent = sorted(set(friends.values()) - set(participants))
        assert panel.rows == participants and panel.columns == [*participants, *absent], "own weights on the diagonal"
        trust = np.asarray(state.clients["trust"])
        for client, row in zip(participants, panel.values, strict=True):
            weights = {
                friend: weight for friend, weight in zip(panel.columns, row, strict=True) if not np.isnan(weight)
            }
            assert weights == {client: trust[client], friends[client]: pytest.approx(1 - trust[client])}


def test_weights_that_the_server_keeps_are_drawn_whole(run, drawn):
    plot = matrix(drawn["liking"])
    for number, panel in enumerate(plot.panels, 1):
        assert list(panel.rows) == list(range(7)) and same(panel.values, run.round(number).server["liking"])
    assert plot.panels[2].values.any()


def test_before_the_first_round_nobody_has_given_weights(run):
    plots = {plot.title: plot for plot in diagnostics.plot_diagnostics([run.round(0)])}
    for title in ("Friends", "Closeness"):
        plot = plots[title]
        assert isinstance(plot, Missing) and "who took part" in plot.why
    distance = plots["Distance"]
    assert isinstance(distance, Missing) and "no checkpoint has a value of it" in distance.why


# --- vectors of classes -------------------------------------------------------------------------------------------


def test_principal_components_of_points_on_a_line():
    values = np.array([[0.0, 0.0, 1.0], [3.0, 4.0, 1.0], [6.0, 8.0, 1.0]])
    points, shares = diagnostics.pca(values)
    assert points == pytest.approx(np.array([[-5.0, 0.0], [0.0, 0.0], [5.0, 0.0]]), abs=1e-12)
    assert shares == pytest.approx([1.0, 0.0])


def test_class_vectors_are_those_that_server_and_clients_know(run):
    state = run.round(3)
    description = state.diagnostics["class_points"]
    assert isinstance(description, ClassVectors)
    vectors = diagnostics.read_known_vectors(state, description)
    has_mean, means = np.asarray(state.clients["classes/held"]), np.asarray(state.clients["classes/means"])
    assert len(vectors.classes) == 10 + has_mean.sum()
    for vector, label, client in zip(vectors.points, vectors.classes, vectors.clients, strict=True):
        expected = state.server["vectors"][label] if client < 0 else means[client, label]
        assert vector.tolist() == expected.tolist()


def test_projections_have_a_point_for_each_class_vector_and_are_repeatable(run, drawn):
    again = {plot.title: plot for plot in diagnostics.plot_diagnostics(checkpoints(run))}
    for name in ("class_points-pca", "class_points-tsne"):
        plot = drawn[name]
        redrawn = again[plot.title]
        assert isinstance(plot, Clouds) and isinstance(redrawn, Clouds) and plot.title.startswith("Class points, ")
        assert [cloud.title for cloud in plot.clouds] == ["round 1", "round 2", "round 3"]
        for cloud, twin, state in zip(
            plot.clouds, redrawn.clouds, pick_first_middle_last(checkpoints(run)), strict=True
        ):
            assert len(cloud.points) == 10 + np.asarray(state.clients["classes/held"]).sum()
            assert np.isfinite(cloud.points).all() and cloud.points.tolist() == twin.points.tolist()
            assert "other marks those of up to 100 clients" in plot.caption


# --- every algorithm of the package -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_what_an_algorithm_declares_is_drawn(case, tmp_path):
    sections = CASES[case]
    quick_run.run(quick_run.settings(sections, training={"rounds": 2}, checkpoint={"keep": 0}), tmp_path / "run")
    states = checkpoints(open_run(tmp_path / "run"))
    plots = diagnostics.plot_diagnostics(states)
    declared = states[-1].diagnostics
    equal = {plot.title for plot in plots if isinstance(plot, Missing) and plot.why.startswith("all equal")}
    assert not [plot for plot in plots if isinstance(plot, Missing) and plot.title not in equal]
    for name, diagnostic in declared.items():
        if diagnostic.title in equal:
            assert isinstance(diagnostic, ClientWeights)
            continue
        figures = [plot for plot in plots if isinstance(plot, Plot) and plot.name.startswith(f"diagnostic-{name}")]
        assert len(figures) == (2 if isinstance(diagnostic, ClassVectors | EntryShare) else 1)
        for plot in figures:
            assert plot.title.startswith(diagnostic.title) and plot.caption.startswith(diagnostic.caption)
            if isinstance(plot, Matrices):
                assert all(np.isfinite(panel.values).any() for panel in plot.panels)
        if isinstance(diagnostic, PerClient | ClientWeights) and diagnostic.limits:
            for panel in matrix(figures[0]).panels:
                finite = panel.values[~np.isnan(panel.values)]
                assert diagnostic.limits[0] <= finite.min() and finite.max() <= diagnostic.limits[1]

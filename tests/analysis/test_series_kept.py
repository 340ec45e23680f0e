"""What algorithms keep, as figures show it: against the state on disk and against the algorithms themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harness
from pflmpi import tree
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.analysis.plots import Clouds, Curves, Matrices, Missing
from pflmpi.analysis.run import Round, Run, open_run
from pflmpi.analysis.series import critical, fusion, projection, ratios, similarity
from pflmpi.analysis.series.kept import ends, kept
from pflmpi.config import load as configuration

NEAR: dict[str, Any] = {"alpha": 0.5, "sigma": 2.0}  # where models of these sizes tell on each other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


def made(folder: Path, name: str, **options: Any) -> Run:
    """A run of three rounds with all its checkpoints; made once."""
    path = folder / "-".join([name, *(str(value) for value in options.values())])
    if not path.exists():
        algorithm = {"name": name, **options}
        harness.run(harness.settings(algorithm=algorithm, checkpoint={"keep": 0}), path)
    return open_run(path)


def states(run: Run) -> list[Round]:
    return [run.round(number) for number in run.rounds]


def matrix(plot: Any) -> Matrices:
    assert isinstance(plot, Matrices), plot
    return plot


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.array_equal(found, expected.astype(np.float64), equal_nan=True))


# --- one number per client ----------------------------------------------------------------------------------------


def test_beta_is_that_of_the_last_update_and_unknown_before_the_first(folder: Path) -> None:
    run = made(folder, "pfedafe")
    (panel,) = matrix(ratios.mixing_ratio(states(run))).panels
    assert panel.columns == [0, 1, 2, 3] and panel.values.shape == (7, 4) and np.isnan(panel.values[:, 0]).all()
    for place, state in enumerate(states(run)):
        trained = np.asarray(state.clients["trained"])
        assert same(panel.values[:, place], np.where(trained, np.asarray(state.clients["beta"]), np.nan))
    assert not np.isnan(panel.values[:, 3]).all()


def test_alpha_is_that_of_every_client(folder: Path) -> None:
    run = made(folder, "apfl")
    (panel,) = matrix(ratios.own_share(states(run))).panels
    assert (panel.values[:, 0] == 0.5).all() and (panel.values[:, 3] != 0.5).any()
    assert same(panel.values[:, 3], np.asarray(run.round(3).clients["alpha"]))


def test_clusters_are_the_servers_and_empty_for_who_has_none(folder: Path) -> None:
    run = made(folder, "fesem", num_clusters=2)
    plot = matrix(ratios.clusters(states(run)))
    cluster = run.round(3).server["cluster"]
    assert plot.categories == ("0", "1") and same(plot.panels[0].values[:, 3], np.where(cluster < 0, np.nan, cluster))
    assert np.isnan(plot.panels[0].values[:, 0]).all()


# --- critical entries ---------------------------------------------------------------------------------------------


def test_overlap_is_both_over_either() -> None:
    psi = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], bool)
    assert critical.jaccard(psi[0], psi[1]) == 0.25
    found = critical.between_clients(psi)
    assert found[:2, :2].tolist() == [[1.0, 0.25], [0.25, 1.0]] and np.isnan(found[2]).all()


def test_critical_entries_are_the_algorithms(folder: Path) -> None:
    run = made(folder, "fedgmh", critical_share=0.25)
    plot = critical.over_rounds(states(run))
    assert isinstance(plot, Curves)
    share, before, across = (curve.y for curve in plot.curves)
    entries = 10 * 12 + 10
    assert np.isnan(share[0]) and share[1:].tolist() == pytest.approx([100 * int(0.25 * entries) / entries] * 3)
    third, second = critical.entries(run.round(3)), critical.entries(run.round(2))
    assert third is not None and second is not None
    assert np.array_equal(third[:, :120].reshape(7, 10, 12), np.asarray(run.round(3).clients["critical/weight"]))
    again = [n for n in range(7) if second[n].any() and (second[n] != third[n]).any()]
    by_hand = [(second[n] & third[n]).sum() / (second[n] | third[n]).sum() for n in again]
    assert again and before[3] == pytest.approx(100 * np.mean(by_hand))
    overlap = matrix(critical.matrix(run.round(3))).panels[0].values
    trained = third.any(1)
    pairs = overlap[np.ix_(trained, trained)][np.triu_indices(trained.sum(), 1)]
    assert across[3] == pytest.approx(pairs.mean())


def test_a_variant_without_critical_entries_says_so(folder: Path) -> None:
    run = made(folder, "fedgmh", variant="avghead")
    found = kept(run, states(run))
    assert len(found) == 2 and all(isinstance(plot, Missing) and "keeps no ψ" in plot.why for plot in found)


# --- fusion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [NEAR, {"alpha": 5.0, "sigma": 2.0}, {"weighting": "cosine"}])
def test_weights_of_fedamp_are_the_algorithms_and_give_the_clouds_on_disk(
    options: dict[str, Any], folder: Path
) -> None:
    run = made(folder, "fedamp", **options)
    plot = matrix(fusion.fedamp(run, ends(states(run))))
    assert [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"] and plot.hide_diagonal
    algorithm = configuration.parse({key: value for key, value in run.config.items() if key != "recorded"}).algorithm
    assert isinstance(algorithm, FedAMP)
    for number, panel in enumerate(plot.panels, 1):
        state, participants = run.round(number), np.array(panel.rows)
        assert participants.tolist() == sorted(state.metrics["participants"].tolist())
        models = {
            path.removeprefix("model/"): np.asarray(rows)[participants]
            for path, rows in state.clients.items()
            if "stats" not in path
        }
        own = algorithm.weights(tree.unflatten({path: torch.from_numpy(rows) for path, rows in models.items()}))
        assert panel.values == pytest.approx(own.numpy(), rel=1e-9, abs=1e-12)
        for path, rows in models.items():
            flat = rows.reshape(len(rows), -1).astype(np.float64)
            cloud = state.server[f"cloud/{path}"][participants].reshape(len(rows), -1)
            assert panel.values @ flat == pytest.approx(cloud, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("unit, layers", [("module", ["body/fc1"]), ("tensor", ["body/fc1/bias", "body/fc1/weight"])])
def test_weights_of_pfedcfr_give_the_fused_layers_on_disk(unit: str, layers: list[str], folder: Path) -> None:
    run = made(folder, "pfedcfr", **NEAR, layer_unit=unit)
    found = [matrix(plot) for plot in fusion.pfedcfr(run, ends(states(run)))]
    assert [plot.title.split(": ")[1] for plot in found] == layers
    for plot, layer in zip(found, layers, strict=True):
        for number, panel in enumerate(plot.panels, 1):
            state, participants = run.round(number), np.array(panel.rows)
            assert np.allclose(panel.values.sum(1), 1) and (panel.values > 0).all()
            for path in [path for path in state.server if path.startswith(f"fused/{layer}")]:
                rows = state.clients[path.replace("fused/", "model/")][participants]
                flat = rows.reshape(len(rows), -1).astype(np.float64)
                fused = state.server[path][participants].reshape(len(rows), -1)
                assert panel.values @ flat == pytest.approx(fused, rel=1e-5, abs=1e-6)


def test_without_personal_layers_pfedcfr_has_no_weights(folder: Path) -> None:
    run = made(folder, "pfedcfr", num_personal_layers=0)
    (plot,) = fusion.pfedcfr(run, ends(states(run)))
    assert isinstance(plot, Missing) and "no layer is personal" in plot.why


def test_an_algorithm_that_keeps_models_alone_has_no_figures_of_its_own(folder: Path) -> None:
    run = made(folder, "fedper")
    assert kept(run, states(run)) == []


# --- class means --------------------------------------------------------------------------------------------------


def test_principal_components_of_points_on_a_line() -> None:
    values = np.array([[0.0, 0.0, 1.0], [3.0, 4.0, 1.0], [6.0, 8.0, 1.0]])
    points, shares = projection.pca(values)
    assert points == pytest.approx(np.array([[-5.0, 0.0], [0.0, 0.0], [5.0, 0.0]]), abs=1e-12)
    assert shares == pytest.approx([1.0, 0.0])


def test_class_means_are_those_that_server_and_clients_know(folder: Path) -> None:
    run = made(folder, "pfedpm")
    found = projection.class_means(run.round(3))
    assert found is not None
    state = run.round(3)
    own, means = np.asarray(state.clients["own/known"]), np.asarray(state.clients["own/means"])
    assert len(found.classes) == state.server["known"].sum() + own.sum()
    for vector, label, client in zip(found.values, found.classes, found.clients, strict=True):
        expected = state.server["means"][label] if client < 0 else means[client, label]
        assert vector.tolist() == expected.tolist()


def test_projections_have_a_point_for_each_class_mean_and_are_repeatable(folder: Path) -> None:
    run = made(folder, "pfedpm")
    plots, again = (projection.projections(ends(states(run))) for _ in range(2))
    assert [plot.name for plot in plots if isinstance(plot, Clouds)] == ["class_means_pca", "class_means_tsne"]
    for plot, other in zip(plots, again, strict=True):
        assert isinstance(plot, Clouds) and isinstance(other, Clouds)
        assert [cloud.title for cloud in plot.clouds] == ["round 1", "round 2", "round 3"]
        for cloud, twin, number in zip(plot.clouds, other.clouds, (1, 2, 3), strict=True):
            known = projection.class_means(run.round(number))
            assert known is not None and len(cloud.points) == len(known.classes)
            assert np.isfinite(cloud.points).all() and cloud.points.tolist() == twin.points.tolist()


def test_class_embeddings_are_drawn_like_class_means_and_called_what_they_are(folder: Path) -> None:
    run = made(folder, "gpfl")
    found = projection.class_embeddings(run.round(3))
    assert found is not None and projection.class_means(run.round(3)) is None
    assert same(found.values, run.round(3).server["shared/embeddings/weight"]) and len(found.values) == 10
    plots = projection.projections(ends(states(run)))
    names = [plot.name for plot in plots if isinstance(plot, Clouds)]
    assert names == ["class_embeddings_pca", "class_embeddings_tsne"]
    everything = np.concatenate([run.round(number).server["shared/embeddings/weight"] for number in (1, 2, 3)])
    first = plots[0]
    assert isinstance(first, Clouds)
    assert np.concatenate([cloud.points for cloud in first.clouds]) == pytest.approx(projection.pca(everything)[0])
    for plot in plots:
        assert isinstance(plot, Clouds) and plot.title.startswith("Class embeddings, ")
        assert "class embeddings" in plot.caption and "means" not in plot.caption and "clients" not in plot.caption
        for cloud in plot.clouds:
            assert cloud.classes.tolist() == list(range(10)) and (cloud.clients == -1).all()


def test_an_algorithm_without_class_means_says_so(folder: Path) -> None:
    (plot,) = projection.projections(ends(states(made(folder, "fedper"))))
    assert isinstance(plot, Missing) and "keep class means" in plot.why


# --- similarity ---------------------------------------------------------------------------------------------------


def test_cosines_are_over_weight_and_bias_of_a_layer(folder: Path) -> None:
    state = made(folder, "pfedpm").round(3)
    plot = matrix(similarity.matrices(state))
    assert [panel.title for panel in plot.panels] == ["model/body/fc1", "model/head"]
    leaves = [np.asarray(state.clients[f"model/head/{name}"]).reshape(7, -1) for name in ("weight", "bias")]
    a, b = np.concatenate([leaf[2] for leaf in leaves]), np.concatenate([leaf[5] for leaf in leaves])
    assert plot.panels[1].values[2, 5] == pytest.approx(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), rel=1e-5)
    assert np.diag(plot.panels[0].values) == pytest.approx(np.ones(7))


def test_the_mean_cosine_is_over_pairs(folder: Path) -> None:
    run = made(folder, "fedper")
    plot = similarity.over_rounds(states(run))
    assert isinstance(plot, Curves) and [curve.label for curve in plot.curves] == ["head"]
    values = matrix(similarity.matrices(run.round(3))).panels[0].values
    assert plot.curves[0].y[3] == pytest.approx(values[np.triu_indices(7, 1)].mean())


def test_clients_that_keep_no_weights_have_no_similarity(folder: Path) -> None:
    plot = similarity.matrices(made(folder, "fedavg").round(3))
    assert isinstance(plot, Missing) and "keep neither bodies nor heads" in plot.why


def test_unlike_models_are_compared_within_their_cohort(tmp_path: Path) -> None:
    model = [{"name": "mlp", "hidden": 12}, {"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}]
    harness.run(harness.settings(algorithm={"name": "fedproto"}, model=model, training={"rounds": 1}), tmp_path / "run")
    state = open_run(tmp_path / "run").round()
    panels = {panel.title: panel.rows for panel in matrix(similarity.matrices(state)).panels}
    assert panels["cohort0/model/head"] == [0, 2, 4, 6] and panels["cohort1/model/head"] == [1, 3, 5]


def test_of_large_models_few_clients_and_rounds_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(folder, "fedper")
    values = 10 * 12 + 10  # of a head
    monkeypatch.setattr(similarity, "_MOST_IN_ALL", 9 * values)  # 4 checkpoints of 10 clients would be 40
    plot = similarity.over_rounds(states(run))
    assert isinstance(plot, Curves) and "Only the first 3 clients" in plot.caption
    assert plot.curves[0].x.tolist() == [0, 2, 3]
    whole = matrix(similarity.matrices(run.round(3))).panels[0].values
    assert plot.curves[0].y[2] == pytest.approx(whole[[0, 0, 1], [1, 2, 2]].mean())

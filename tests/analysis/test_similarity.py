"""Cosines between the layers of the clients' personal models: against the models themselves."""

from pathlib import Path

import numpy as np
import pytest

import newcomer
import quick_run
from pflmpi.analysis.model import read_client_state_dict
from pflmpi.analysis.plots import Curves, Matrices, Missing
from pflmpi.analysis.run import Run, open_run
from pflmpi.analysis.series import similarity
from pflmpi.store import probe_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("similarity")


def made(folder, name, **sections):
    """All checkpoints of a run of three rounds; made once."""
    path = folder / "-".join([name, *sections])
    if not path.exists():
        quick_run.run(quick_run.settings(algorithm={"name": name}, checkpoint={"keep": 0}, **sections), path)
    run = open_run(path)
    return [run.round(number) for number in run.rounds]


def matrices(checkpoints):
    plot = similarity.plot_cosines(checkpoints)[0]
    assert isinstance(plot, Matrices), plot
    return plot


def curves(checkpoints):
    plot = similarity.plot_cosines(checkpoints)[1]
    assert isinstance(plot, Curves), plot
    return plot


def test_cosines_are_over_weight_and_bias_of_a_layer_of_two_personal_models(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        raw = quick_run.settings(algorithm=newcomer.registered(patch), checkpoint={"keep": 0})
        quick_run.run(raw, tmp_path / "run")
    state = open_run(tmp_path / "run").round(3)
    plot = matrices([state])
    assert [panel.title for panel in plot.panels] == ["body/fc1", "head"]
    models = [read_client_state_dict(state, client) for client in (2, 5)]
    a, b = (np.concatenate([model["head.bias"], model["head.weight"].ravel()]) for model in models)
    assert plot.panels[1].values[2, 5] == pytest.approx(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), rel=1e-5)
    assert np.diag(plot.panels[0].values) == pytest.approx(np.ones(7))


def test_the_mean_cosine_is_over_pairs_of_layers_that_differ(folder):
    checkpoints = made(folder, "fedper")
    plot = curves(checkpoints)
    assert [curve.label for curve in plot.curves] == ["head"], "all have the same body"
    values = matrices(checkpoints).panels[0].values
    assert plot.curves[0].y[3] == pytest.approx(values[np.triu_indices(7, 1)].mean())


def test_clients_with_one_model_have_no_similarity(folder):
    (plot,) = similarity.plot_cosines(made(folder, "fedavg"))
    assert isinstance(plot, Missing) and "all clients predict with the same model" in plot.why


def test_cka_of_equal_models_is_not_drawn_and_of_a_layer_that_all_share_neither(monkeypatch):
    equal, unlike = np.ones((3, 3)) - 1e-9 * np.arange(9).reshape(3, 3), np.eye(3) + 0.4
    clients = np.arange(3)

    def figures(**layers):
        by_name = {name: probe_file.LayerSimilarity(clients, cka) for name, cka in layers.items()}
        monkeypatch.setattr(probe_file, "rounds", lambda _: [1])
        monkeypatch.setattr(probe_file, "read", lambda *_: probe_file.Probe(1, 9, by_name))
        return similarity.plot_cka(Run(Path("x"), {}, "a"))

    (none,) = figures(body=equal, head=equal)
    assert isinstance(none, Missing) and "same model" in none.why
    (nothing,) = figures()
    assert isinstance(nothing, Missing) and nothing.why == "the probe of round 1 has noted the outputs of no layer"
    shown, _ = figures(body=equal, head=unlike)
    assert isinstance(shown, Matrices) and [panel.title for panel in shown.panels] == ["head"]
    assert shown.own_scales and "not drawn: body." in shown.caption


def test_clients_that_are_tested_with_what_they_last_received_differ(folder):
    plot = matrices(made(folder, "fedavg", evaluation={"absent": "last_received"}))
    assert [panel.title for panel in plot.panels] == ["body/fc1", "head"]


def test_unlike_models_are_compared_within_their_cohort(folder):
    model = [{"name": "mlp", "hidden": 12}, {"name": "cnn", "hidden": 12, "kernel": 3, "padding": 1}]
    panels = {panel.title: panel.rows for panel in matrices(made(folder, "fedproto", model=model)).panels}
    assert panels["cohort0/head"] == [0, 2, 4, 6] and panels["cohort1/head"] == [1, 3, 5]


def test_of_large_models_few_clients_and_rounds_are_read(folder, monkeypatch):
    checkpoints = made(folder, "fedper")
    values = 64 * 12 + 12 + 12 * 10 + 10
    monkeypatch.setattr(similarity, "_MOST_READ", 9 * values)  # 4 checkpoints of 7 clients would be 28
    plot = curves(checkpoints)
    assert "3 of 7 clients, evenly spaced." in plot.caption
    assert plot.curves[0].x.tolist() == [0, 2, 3]
    cosines = matrices(checkpoints).panels[0].values
    assert plot.curves[0].y[2] == pytest.approx(cosines[[0, 0, 3], [3, 6, 6]].mean())

"""What is reported of a client is what its model gets right on its own test samples; what rounds are diagnosed with."""

import numpy as np
import pytest

import both_ways
import pflmpi
import quick_run
from pflmpi.store import run_folder


def test_every_client_is_scored_by_its_own_samples_alone(tmp_path):
    """Public FedProto code never resets its counters between clients, so that its mean is one of running totals."""
    raw = quick_run.settings(algorithm={"name": "fedproto"})
    quick_run.run(raw, tmp_path / "run")
    federation = both_ways.federation_of(raw)
    server = run_folder.read_server(tmp_path / "run", 3)
    ((clients, state),) = run_folder.read_clients(tmp_path / "run", 3, both_ways.everyone(federation)).values()
    right = []
    for row, client in enumerate(clients):
        samples = federation.test[client]
        x = (federation.dataset.images[samples].reshape(len(samples), -1) / 255 - 0.5) / 0.5
        z = np.maximum(x @ state["model/body/fc1/weight"][row].T + state["model/body/fc1/bias"][row], 0)
        distance = ((z[:, np.newaxis] - server["means"]) ** 2).sum(-1)
        distance[:, ~server["known"]] = np.inf
        right.append(int((distance.argmin(1) == federation.dataset.labels[samples]).sum()))
    metrics = run_folder.read_metrics(tmp_path / "run", 3)
    assert metrics["correct"].tolist() == right
    assert metrics["total"].tolist() == [len(samples) for samples in federation.test]
    assert len(set(right)) > 2, "clients differ, so that running totals would not pass"
    expected = np.mean(np.array(right) / metrics["total"])
    assert float(metrics["accuracy_mean"]) == expected


NAMES = ["fedamp", "fedamp-cosine", "pfedcfr-module", "pfedcfr-tensor"]
OPTIONS = {
    "fedamp": {"alpha": 0.5, "sigma": 2.0},
    "fedamp-cosine": {"weighting": "cosine"},
    "pfedcfr-module": {"alpha": 0.5, "sigma": 2.0, "num_personal_layers": 2},
    "pfedcfr-tensor": {"alpha": 0.5, "sigma": 2.0, "num_personal_layers": 3, "layer_unit": "tensor"},
}


@pytest.fixture(scope="module", params=NAMES)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    algorithm = {"name": request.param.split("-")[0], **OPTIONS[request.param]}
    quick_run.run(quick_run.settings(algorithm=algorithm, checkpoint={"keep": 0}), folder, ranks=2)
    return request.param, folder


def rows(folder, round, participants):
    (_, arrays) = run_folder.read_clients(folder, round, participants)["cohort0"]
    return {path.removeprefix("model/"): array for path, array in arrays.items()}


@pytest.mark.parametrize("round", [1, 3])
def test_the_measured_weights_give_the_models_that_the_server_answers(run, round):
    name, folder = run
    participants = run_folder.read_metrics(folder, round)["participants"]
    measured, kept = run_folder.read_section(folder, round, "diagnostics"), rows(folder, round, participants)
    uploaded = {path: array for path, array in kept.items() if not path.startswith("answered/")}
    layers = {
        "fedamp": {"fusion_weights": list(uploaded)},
        "pfedcfr-module": {
            "fusion_weights_body_fc1": ["body/fc1/weight", "body/fc1/bias"],
            "fusion_weights_head": ["head/weight", "head/bias"],
        },
        "pfedcfr-tensor": {
            "fusion_weights_body_fc1_weight": ["body/fc1/weight"],
            "fusion_weights_head_weight": ["head/weight"],
        },
    }[name.removesuffix("-cosine")]
    assert measured.keys() == layers.keys()
    answer = "cloud" if "fedamp" in name else "personal"
    for key, paths in layers.items():
        assert measured[key].shape == (len(participants), len(participants))
        np.testing.assert_allclose(measured[key].sum(1), 1, rtol=1e-12)
        for path in paths:
            mixed = np.tensordot(measured[key], uploaded[path].astype(np.float64), 1)
            np.testing.assert_allclose(kept[f"answered/{answer}/{path}"], mixed, rtol=1e-5, atol=1e-7)


def test_nothing_is_measured_before_the_first_round(run):
    assert run_folder.read_section(run[1], 0, "diagnostics") == {}


def test_a_checkpoint_that_a_stop_asks_for_has_the_same_diagnostics(tmp_path):
    def interrupt(row):
        raise KeyError("stop")

    settings = quick_run.settings(algorithm={"name": "fedamp"})
    with pytest.raises(KeyError, match="stop"):
        rarely = quick_run.settings(settings, training={"rounds": 500}, checkpoint={"every": 500})
        pflmpi.run(pflmpi.Config(**rarely), out=tmp_path / "stopped", quiet=True, on_round=interrupt)
    round = run_folder.rounds(tmp_path / "stopped")[-1]
    assert 0 < round < 500
    quick_run.run(quick_run.settings(settings, training={"rounds": round}), tmp_path / "whole")
    stopped, whole = (run_folder.read_section(tmp_path / name, round, "diagnostics") for name in ("stopped", "whole"))
    assert stopped.keys() == whole.keys() == {"fusion_weights"}
    np.testing.assert_array_equal(stopped["fusion_weights"], whole["fusion_weights"])

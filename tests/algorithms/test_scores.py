"""What is reported of a client is what its model gets right on its own test samples, as a checkpoint shows it."""

import numpy as np

import both_ways
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

"""A run on one rank and on two, and what must hold of any run."""

import numpy as np

import quick_run
from pflmpi.config import load as configuration
from pflmpi.experiment.build import load_federation
from pflmpi.store import run_folder


def federation_of(raw):
    return load_federation(configuration.parse(raw))


def run(raw, folder):
    """Run on one rank and on two; check what must hold for every run; return the digest and the first run's folder."""
    raw = {**raw, "checkpoint": {"keep": 0, **raw.get("checkpoint", {})}}
    digest = quick_run.run(raw, folder / "one")
    assert quick_run.run(raw, folder / "two", ranks=2) == digest
    federation, saved_rounds = federation_of(raw), run_folder.rounds(folder / "one")
    rounds = raw["training"]["rounds"]
    assert saved_rounds[0] == 0 and saved_rounds[-1] == rounds
    assert run_folder.digest(folder / "one", 0) != digest, "training has changed something"
    for name in ("one", "two"):
        metrics = run_folder.read_metrics(folder / name, rounds)
        assert metrics["total"].tolist() == federation.num_test.tolist()
        assert (metrics["correct"] <= metrics["total"]).all() and metrics["total"].sum() > 0
        assert 0 <= metrics["accuracy_mean"] <= 1 and 0 <= metrics["accuracy_weighted"] <= 1
    state = dict(run_folder.read_server(folder / "one", rounds))
    for cohort, (_, arrays) in run_folder.read_clients(folder / "one", rounds, everyone(federation)).items():
        state.update({f"{cohort}/{path}": array for path, array in arrays.items()})
    assert state and all(np.isfinite(array).all() for array in state.values())
    return digest, folder / "one"


def everyone(federation):
    return np.arange(federation.num_clients)

"""The example that reads a run works as written, on any run."""

import os
import subprocess
import sys

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.run import open_run
from project import ROOT

SCRIPT = ROOT / "examples" / "read_a_run.py"


def read(run):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_it_has_cells():
    assert SCRIPT.read_text().count("\n# %% ") >= 5


def test_it_shows_what_is_in_the_run(tmp_path):
    quick_run.run(quick_run.settings(), tmp_path / "run")
    code, lines = read(tmp_path / "run")
    run = open_run(tmp_path / "run")
    mean = run.columns["accuracy_mean"]
    assert code == 0, lines
    assert any(line.startswith(f"best round: {mean.argmax() + 1}, mean accuracy {mean.max():.4f}") for line in lines)
    weights = np.asarray(run.round().clients["model/head/weight"]).reshape(7, -1)
    apart = np.linalg.norm(weights - weights[0], axis=1)
    nearest = apart[1:].argmin() + 1
    assert f"client 0: nearest is client {nearest}, {apart[nearest]:.4f} away" in lines


@pytest.mark.parametrize("absent", ["latest", "last_received"])
def test_it_says_so_where_clients_keep_no_heads(tmp_path, absent):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, evaluation={"absent": absent}, training={"rounds": 1})
    quick_run.run(raw, tmp_path / "run")
    code, lines = read(tmp_path / "run")
    if absent == "latest":
        assert code == 1 and lines[-1].startswith("the clients of this run keep no heads")
    else:
        assert code == 0 and any("received/model/head/weight" in line for line in lines)

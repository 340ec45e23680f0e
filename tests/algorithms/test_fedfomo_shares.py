"""The shares that FedFomo's clients keep of their last mix: against the models of a run's checkpoints."""

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.plots import Matrices
from pflmpi.analysis.run import open_run
from pflmpi.analysis.series import diagnostics


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three rounds with all its checkpoints, in which others' models are worth something."""
    folder = tmp_path_factory.mktemp("shares") / "run"
    settings = quick_run.settings(
        algorithm={"name": "fedfomo", "received_models": 2},
        training={"participation": 0.7, "lr": 0.5},
        checkpoint={"keep": 0},
    )
    quick_run.run(settings, folder)
    return open_run(folder)


def test_shares_are_those_that_give_the_mixes_on_disk(run):
    """Solved for from a client's mix and the models that were in it; positive where the raw weight was."""
    rounds = [run.round(number) for number in run.rounds]
    plot = diagnostics.figures(rounds)[0]
    assert isinstance(plot, Matrices) and [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"]
    mixes = []
    for panel, state in zip(plot.panels, rounds[1:], strict=True):
        last = run.round(state.number - 1)
        gains = state.server["affinity"] - last.server["affinity"]
        for client, row in zip(panel.rows, panel.values, strict=True):
            sent = [int(one) for one in np.asarray(state.clients["mix/clients"])[client] if one >= 0]
            drawn = {other: share for other, share in zip(panel.columns, row, strict=True) if not np.isnan(share)}
            assert set(drawn) == {client, *sent}
            before = [path for path in state.clients if path.startswith("before/")]
            paths = [path.replace("before", "model", 1) for path in before]
            models = [[np.asarray(last.clients[path])[one] for path in paths] for one in (client, *sent)]
            columns = np.stack([np.concatenate([leaf.ravel() for leaf in model]) for model in models], 1)
            mixed = np.concatenate([np.asarray(state.clients[path])[client].ravel() for path in before])
            solved = np.linalg.lstsq(columns.astype(np.float64), mixed.astype(np.float64), rcond=None)[0]
            assert [drawn[other] for other in (client, *sent)] == pytest.approx(solved, abs=1e-4)
            if drawn[client] < 1:
                assert [drawn[other] > 0 for other in sent] == [gains[client, other] > 0 for other in sent]
            mixes.append(drawn[client])
    assert any(0 < own < 1 for own in mixes), "somebody did mix"

"""FedFomo's mixes and affinities, as figures show them: against the checkpoints of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.analysis.plots import Matrices, Missing
from pflmpi.analysis.run import Run, open_run
from pflmpi.analysis.series import candidates
from pflmpi.analysis.series.kept import kept


def made(folder: Path) -> Run:
    """A run of three rounds with all its checkpoints, in which others' models are worth something."""
    settings = harness.settings(
        algorithm={"name": "fedfomo", "received_models": 2},
        training={"participation": 0.7, "lr": 0.5},
        checkpoint={"keep": 0},
    )
    harness.run(settings, folder)
    return open_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return made(tmp_path_factory.mktemp("candidates") / "run")


def matrix(plot: Any) -> Matrices:
    assert isinstance(plot, Matrices), plot
    return plot


def test_affinities_of_fedfomo_are_the_servers(run: Run) -> None:
    plot = matrix(candidates.affinities([run.round(number) for number in (1, 2, 3)]))
    assert [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"]
    assert plot.panels[2].values.tolist() == run.round(3).server["affinity"].tolist() and plot.panels[2].values.any()


def test_shares_of_fedfomo_are_those_that_give_the_mixes_on_disk(run: Run) -> None:
    """Solved for from a client's mix and the models that were in it; positive where the raw weight was."""
    rounds = [run.round(number) for number in run.rounds]
    plot = matrix(candidates.shares(rounds))
    assert [panel.title for panel in plot.panels] == ["round 1", "round 2", "round 3"]
    mixes = []
    for panel, state in zip(plot.panels, rounds[1:], strict=True):
        last = run.round(state.number - 1)
        assert list(panel.rows) == sorted(state.metrics["participants"].tolist())
        gains = state.server["affinity"] - last.server["affinity"]
        everyone = set(panel.rows)
        for client, row in zip(panel.rows, panel.values, strict=True):
            sent = [int(one) for one in last.server["chosen"][client] if one >= 0]
            everyone |= set(sent)
            drawn = {other: share for other, share in zip(panel.columns, row, strict=True) if not np.isnan(share)}
            assert set(drawn) == {client, *sent}
            before = [path for path in state.clients if path.startswith("before/")]
            models = [[np.asarray(last.clients[path.replace("before", "model", 1)])[client] for path in before]]
            models += [[last.server[path.replace("before", "models", 1)][other] for path in before] for other in sent]
            columns = np.stack([np.concatenate([leaf.ravel() for leaf in model]) for model in models], 1)
            mixed = np.concatenate([np.asarray(state.clients[path])[client].ravel() for path in before])
            solved = np.linalg.lstsq(columns.astype(np.float64), mixed.astype(np.float64), rcond=None)[0]
            assert [drawn[other] for other in (client, *sent)] == pytest.approx(solved, abs=1e-4)
            if drawn[client] < 1:
                assert [drawn[other] > 0 for other in sent] == [gains[client, other] > 0 for other in sent]
            mixes.append(drawn[client])
        others = sorted(everyone - set(panel.rows))
        assert list(panel.columns) == [*panel.rows, *others], "so that a client's own share is on the diagonal"
    assert any(0 < own < 1 for own in mixes), "somebody did mix"


def test_a_round_draws_the_mixes_of_its_own_participants_alone(run: Run) -> None:
    plot = candidates.shares([run.round(0)])
    assert isinstance(plot, Missing) and "who took part" in plot.why
    absent = set(range(7)) - set(run.round(3).metrics["participants"].tolist())
    assert absent and not absent & set(matrix(candidates.shares([run.round(3)])).panels[0].rows)


def test_of_a_run_without_kept_mixes_the_affinities_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version wrote it."""
    first, update = FedFomo.init_client, FedFomo.client_update

    def without(state: Any) -> Any:
        return {name: value for name, value in state.items() if name != "mix"}

    def updated(*given: Any) -> Any:
        state, up = update(*given)
        return without(state), up

    monkeypatch.setattr(FedFomo, "init_client", lambda *given: without(first(*given)))
    monkeypatch.setattr(FedFomo, "client_update", updated)
    run = made(tmp_path / "run")
    shares, affinities = kept(run, [run.round(number) for number in run.rounds])
    assert isinstance(shares, Missing) and "an earlier version" in shares.why
    assert matrix(affinities).name == "affinity"

"""The model of a round: found again where it is true, wide where little was measured, refused where too little was."""

import csv
from pathlib import Path

import numpy as np
import pytest

import scale_folder
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.scaling.model import fit
from pflmpi.scaling.results import results

CLIENTS = 4  # that take part, as in the helper
TRUTH = {"fixed": 0.25, "client": 2.0, "imbalance": 0.5, "server": 0.125, "latency": 0.0625, "byte": 0.0005}


def seconds(ranks: int) -> dict[str, float]:
    """A round as the model says; the helper sends 100 bytes for each rank after the first."""
    clients = max(CLIENTS / ranks, 1)
    busy, waiting = TRUTH["fixed"] + TRUTH["client"] * clients, TRUTH["imbalance"] * clients * (1 - 1 / ranks)
    exchange = TRUTH["server"] + TRUTH["latency"] * np.ceil(np.log2(ranks)) + TRUTH["byte"] * 100 * (ranks - 1)
    compute = busy + waiting
    return {
        "seconds": compute + exchange + 0.5,
        "compute_seconds": compute,
        "waiting_seconds": waiting,
        "evaluation_seconds": busy / 4,
        "checkpoint_seconds": 0.5,
    }


def test_coefficients_are_found_again_and_hold_for_a_thousand_ranks(tmp_path: Path) -> None:
    out = scale_folder.measured(
        tmp_path, scale_folder.scaling([1, 2, 3, 4, 8], partition={"name": "iid", "clients": 7}), seconds
    )
    model = fit(results(out), 1000)
    found = model.coefficients()
    assert {name: found[name].value for name in TRUTH} == pytest.approx(TRUTH, rel=1e-6)
    assert found["checkpoint"].value == pytest.approx(0.5)
    thousand = model.seconds(1000)
    assert thousand.value == pytest.approx(seconds(1000)["seconds"], rel=1e-6)
    assert thousand.high - thousand.low < 1e-5, "nothing is uncertain"


def test_noise_makes_the_interval_wide_and_wider_farther_away(tmp_path: Path) -> None:
    drawn = np.random.default_rng(5)

    def noisy(ranks: int) -> dict[str, float]:
        true = seconds(ranks)
        more = 0.02 * float(drawn.standard_normal())
        return {**true, "seconds": true["seconds"] + abs(more), "compute_seconds": true["compute_seconds"] - more}

    out = scale_folder.measured(tmp_path, scale_folder.scaling([1, 2, 3, 4], repeats=4), noisy)
    model = fit(results(out), 1000)
    near, far = model.seconds(4), model.seconds(1000)
    assert near.low < seconds(4)["seconds"] < near.high and 0 < near.high - near.low < 1
    assert far.high - far.low > 10 * (near.high - near.low)


def test_weak_experiments_keep_the_clients_of_a_rank(tmp_path: Path) -> None:
    """The helper has four participants at every point, so four ranks have one each."""
    model = fit(results(scale_folder.measured(tmp_path, scale_folder.scaling([1, 2, 4], "weak"), seconds)), 1000)
    assert model.size(1000).clients == model.size(1).clients


def test_too_few_points_and_ranks_that_share_a_machine_are_refused(tmp_path: Path) -> None:
    two = results(scale_folder.measured(tmp_path / "two", scale_folder.scaling([1, 2])))
    with pytest.raises(ConfigError, match=r"--to needs 3 numbers of ranks that were measured, and there are 2"):
        fit(two, 1000)
    packed = results(scale_folder.measured(tmp_path / "packed", scale_folder.scaling([1, 2, 4], "packing")))
    with pytest.raises(ConfigError, match="says nothing of more machines"):
        fit(packed, 1000)


def test_the_page_draws_the_model_apart_from_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = scale_folder.measured(tmp_path / "s", scale_folder.scaling([1, 2, 4]), seconds)
    assert main(["report", str(out), "--to", "1000"]) == 0
    page = (out / "scale.html").read_text()
    assert "Extrapolation to 1000 ranks" in page and "far beyond" in page and page.count("<svg") == 7
    with open(out / "figures" / "extrapolation.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["curve"] for line in lines} == {"measured", "model, and its 95 % interval"}
    assert max(float(line["ranks"]) for line in lines) == 1000 and float(lines[-1]["low"]) <= float(lines[-1]["high"])
    assert main(["report", str(out), "--to", "3"]) == 2 and "--to 3: must be more than 4" in capfd.readouterr().err
    assert main(["report", str(out)]) == 0 and "Extrapolation" not in (out / "scale.html").read_text()
    assert not list((out / "figures").glob("extrapolation*")), "nor beside the page"

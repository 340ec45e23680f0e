"""The model of a round: found again where it is true, wide where little was measured, refused where too little was."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import quick_run
import scale_folder
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.scaling.experiment import WARM_UP, Scaling
from pflmpi.scaling.fitting import fit
from pflmpi.scaling.model import Size
from pflmpi.scaling.results import results
from pflmpi.scaling.sizes import sizes
from planned_run import SLOTS

TRUTH = {"fixed": 0.25, "client": 2.0, "imbalance": 0.5, "server": 0.125, "latency": 0.0625, "byte": 0.0005}


def by_the_model(size: Callable[[int], Size]) -> Callable[[int], dict[str, float]]:
    """The columns of a round that is as the model says."""

    def columns(ranks: int) -> dict[str, float]:
        one = size(ranks)
        busy, waiting = TRUTH["fixed"] + TRUTH["client"] * one.clients, TRUTH["imbalance"] * one.clients
        exchange = TRUTH["server"] + TRUTH["latency"] * one.delays + TRUTH["byte"] * one.path_bytes
        waiting *= 1 - 1 / ranks
        return {
            "seconds": busy + waiting + exchange + 0.5,
            "compute_seconds": busy + waiting,
            "waiting_seconds": waiting,
            "evaluation_seconds": busy / 4,
            "checkpoint_seconds": 0.5,
        }

    return columns


def sizes_of(found: Scaling, folder: Path) -> Callable[[int], Size]:
    return sizes(results(scale_folder.measured(folder / "sizes", found)))


def test_bytes_are_those_that_ranks_count_and_grow_as_the_schedule_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg: the participants' models up, one model down to each rank but the first, however many ranks there are."""
    monkeypatch.setitem(scale_folder.ABOUT, "cores", str(SLOTS))  # three ranks on two: rank 0 serves only
    parts = {
        "algorithm": {"name": "fedavg"},
        "partition": {"name": "iid", "clients": 7},
        "runtime": {"executor": "loop"},
    }
    found = scale_folder.scaling([1, 2, 4], **parts)
    size = sizes_of(found, tmp_path)
    for ranks in (1, 3):
        quick_run.run(found.raw(ranks), tmp_path / f"run{ranks}", ranks)
        counted = open_run(tmp_path / f"run{ranks}").columns
        moved = (counted["wire_up_bytes"] + counted["wire_down_bytes"])[WARM_UP:].mean()
        assert size(ranks).wire_bytes == moved and bool(moved) == (ranks > 1)
    model = 4 * (64 * 12 + 12 + 12 * 10 + 10)  # bytes
    assert size(1000).wire_bytes - size(500).wire_bytes == 500 * model, "as many go up"
    assert size(8).clients == 1 and size(1).clients == 3 and size(1).delays == size(1).path_bytes == 0
    assert size(1000).path_bytes < size(1000).wire_bytes / 10, "what passes at the same time counts once"


def test_coefficients_are_found_again_and_hold_for_a_thousand_ranks(tmp_path: Path) -> None:
    found = scale_folder.scaling([1, 2, 3, 4, 8], partition={"name": "iid", "clients": 7})
    seconds = by_the_model(sizes_of(found, tmp_path))
    model = fit(results(scale_folder.measured(tmp_path / "s", found, seconds)), 1000)
    coefficients = model.coefficients()
    assert {name: coefficients[name].value for name in TRUTH} == pytest.approx(TRUTH, rel=1e-6)
    assert coefficients["checkpoint"].value == pytest.approx(0.5)
    thousand = model.seconds(1000)
    assert thousand.value == pytest.approx(seconds(1000)["seconds"], rel=1e-6)
    assert thousand.high - thousand.low < 1e-3 * thousand.value, "nothing is uncertain"


def test_noise_makes_the_interval_wide_and_wider_farther_away(tmp_path: Path) -> None:
    drawn, found = np.random.default_rng(5), scale_folder.scaling([1, 2, 3, 4], repeats=4)
    seconds = by_the_model(sizes_of(found, tmp_path))

    def noisy(ranks: int) -> dict[str, float]:
        true = seconds(ranks)
        more = 0.02 * float(drawn.standard_normal())
        return {**true, "seconds": true["seconds"] + abs(more), "compute_seconds": true["compute_seconds"] - more}

    model = fit(results(scale_folder.measured(tmp_path / "s", found, noisy)), 1000)
    near, far = model.seconds(4), model.seconds(1000)
    assert near.low < seconds(4)["seconds"] < near.high and 0 < near.high - near.low < 1
    assert far.high - far.low > 10 * (near.high - near.low)


def test_weak_experiments_keep_the_clients_of_a_rank(tmp_path: Path) -> None:
    """400 samples have not 7,000 clients: those of the first point are repeated."""
    size = sizes_of(scale_folder.scaling([1, 2, 4], "weak", runtime={"executor": "loop"}), tmp_path)
    assert size(1).clients == 3 and size(1000).clients == pytest.approx(2.8, abs=0.01)


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
    out = scale_folder.measured(tmp_path / "s", scale_folder.scaling([1, 2, 4]))
    assert main(["report", str(out), "--to", "1000"]) == 0
    page = (out / "scale.html").read_text()
    assert "Extrapolation to 1000 ranks" in page and "far beyond" in page and page.count("<svg") == 7
    with open(out / "figures" / "extrapolation.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["curve"] for line in lines} == {"measured", "model, and its 95 % interval"}
    assert max(float(line["ranks"]) for line in lines) == 1000 and float(lines[-1]["low"]) <= float(lines[-1]["high"])
    assert "between ranks by the schedule" in page
    assert main(["report", str(out), "--to", "3"]) == 2 and "--to 3: must be more than 4" in capfd.readouterr().err
    assert main(["report", str(out)]) == 0 and "Extrapolation" not in (out / "scale.html").read_text()
    assert not list((out / "figures").glob("extrapolation*")), "nor beside the page"


def test_runs_whose_data_is_gone_have_no_schedule_and_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = scale_folder.scaling([1, 2, 4])
    found.config["data"] |= {"name": "mnist", "root": str(tmp_path / "gone")}
    out = scale_folder.measured(tmp_path / "s", found)
    assert main(["report", str(out), "--to", "1000"]) == 2
    assert "--to counts the messages, for which it needs what the runs were made with: " in capfd.readouterr().err
    assert main(["report", str(out)]) == 0, "what was measured is shown without"

"""The serial fraction: found again where it is true, wide where points scatter, refused with too few points."""

import csv
import json
import shutil
import signal

import numpy as np
import pytest
import yaml

import quick_run
import scale_folder
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.scaling import running
from pflmpi.scaling.experiment import folder
from pflmpi.scaling.extrapolation import fit
from pflmpi.scaling.results import read_results
from pflmpi.sweep.runs import SweepOutcome

FIRST, SERIAL = 2.0, 0.125


def strong(ranks):
    """Amdahl's law: 1/8 of 2 seconds is serial."""
    return {"seconds": FIRST * (SERIAL + (1 - SERIAL) / ranks)}


def test_the_serial_fraction_of_amdahls_law_is_found_again(tmp_path):
    scaling = scale_folder.scaling([1, 2, 4])
    law = fit(read_results(scale_folder.measured(tmp_path / "s", scaling, strong)), 1000)
    assert law.first == pytest.approx(2.0) and law.serial.value == pytest.approx(0.125)
    assert law.seconds(1000).value == pytest.approx(0.25 + 1.75 / 1000, rel=1e-6)
    assert law.serial.high - law.serial.low < 1e-4, "nothing is uncertain"


def test_in_weak_experiments_the_serial_part_grows_with_the_work(tmp_path):
    scaling = scale_folder.scaling([1, 2, 4], "weak")
    law = fit(
        read_results(scale_folder.measured(tmp_path / "s", scaling, lambda r: {"seconds": r * strong(r)["seconds"]})),
        1000,
    )
    assert law.serial.value == pytest.approx(0.125) and law.seconds(8).value == pytest.approx(8 * 0.25 + 1.75)


def test_points_that_scatter_make_the_interval_wide_and_it_holds_the_truth(tmp_path):
    drawn, scaling = np.random.default_rng(5), scale_folder.scaling([1, 2, 4, 8], repeats=4)

    def noisy(ranks):
        return {"seconds": strong(ranks)["seconds"] + 0.05 * float(drawn.standard_normal())}

    law = fit(read_results(scale_folder.measured(tmp_path / "s", scaling, noisy)), 1000)
    assert law.serial.low < SERIAL < law.serial.high
    assert 0.01 < law.serial.high - law.serial.low < 0.2
    assert law.seconds(1000).low < strong(1000)["seconds"] < law.seconds(1000).high


def test_what_scales_perfectly_has_no_serial_fraction_below_zero(tmp_path):
    scaling = scale_folder.scaling([1, 2, 4])
    law = fit(read_results(scale_folder.measured(tmp_path / "s", scaling, lambda r: {"seconds": 2 / r**1.2})), 1000)
    assert law.serial.value == pytest.approx(0, abs=1e-6) and law.serial.low == 0


def test_too_few_points_and_ranks_that_share_a_machine_are_refused(tmp_path):
    two = read_results(scale_folder.measured(tmp_path / "two", scale_folder.scaling([1, 2])))
    with pytest.raises(ConfigError, match=r"--to needs 3 numbers of ranks that were measured, and there are 2"):
        fit(two, 1000)
    packed = read_results(scale_folder.measured(tmp_path / "packed", scale_folder.scaling([1, 2, 4], "packing")))
    with pytest.raises(ConfigError, match="says nothing of more machines"):
        fit(packed, 1000)


@pytest.mark.parametrize(
    ("outcome", "num_measured", "code", "why"),
    [
        (SweepOutcome({"4 ranks, repeat 1": "no memory is left"}), 2, 1, "measured numbers of ranks, and there are 2"),
        (SweepOutcome({"1 rank, repeat 1": "no memory is left"}), 0, 1, "measured numbers of ranks, and there are 0"),
        (SweepOutcome(signal=signal.SIGTERM), 1, 75, "measured numbers of ranks, and there are 1"),
        (SweepOutcome(signal=signal.SIGINT), 3, 130, "the measurement was stopped"),
    ],
)
def test_what_was_measured_is_shown_also_where_it_cannot_be_extrapolated(
    tmp_path, capfd, monkeypatch, outcome, num_measured, code, why
):
    out = scale_folder.measured(tmp_path / "s", scale_folder.scaling([1, 2, 4]))
    for ranks in (1, 2, 4)[num_measured:]:
        shutil.rmtree(folder(out, ranks))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    monkeypatch.setattr(running, "measure", lambda *_: outcome)
    words = ["--ranks", "1,2,4", "--repeats", "2", "--rounds", str(scale_folder.ROUNDS), "--out", str(out)]
    assert main(["scale", str(tmp_path / "c.yaml"), *words, "--to", "50", "--json"]) == code
    shown, err = capfd.readouterr()
    assert "no extrapolation to 50 ranks: " in err and f"{why}\n" in err
    assert json.loads(shown)["extrapolation"] is None
    assert [bool(point["runs"]) for point in json.loads(shown)["points"]] == [n < num_measured for n in range(3)]
    assert (out / "scale.csv").exists() and (out / "scale.html").exists() == bool(num_measured)


def test_the_page_draws_the_law_apart_from_what_was_measured(tmp_path, capfd):
    out = scale_folder.measured(tmp_path / "s", scale_folder.scaling([1, 2, 4]))
    assert main(["report", str(out), "--to", "1000"]) == 0
    page = (out / "scale.html").read_text()
    assert "Extrapolation to 1000 ranks" in page and "250 times the largest number that was measured" in page
    with open(out / "figures" / "extrapolation.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["curve"] for line in lines} == {"measured", "Amdahl's law"}
    assert max(float(line["ranks"]) for line in lines) == 1000 and float(lines[-1]["low"]) <= float(lines[-1]["high"])
    assert main(["report", str(out), "--to", "3"]) == 2 and "--to 3: must be more than 4" in capfd.readouterr().err
    assert main(["report", str(out)]) == 0 and "Extrapolation" not in (out / "scale.html").read_text()
    assert not list((out / "figures").glob("extrapolation*")), "nor beside the page"

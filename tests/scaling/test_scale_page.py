"""The page over scaling experiments: one file, figures in four formats, several experiments over each other."""

import csv
import os
import re
import shutil

import numpy as np
import pytest

import quick_run
import scale_folder
from pflmpi.analysis.plots import Curves, Stack
from pflmpi.cli import main
from pflmpi.commands import scale
from pflmpi.scaling import records
from pflmpi.scaling.experiment import runs
from pflmpi.scaling.page import plot_figures
from pflmpi.scaling.results import PARTS, read_results


@pytest.fixture
def strong(tmp_path):
    return scale_folder.measured(tmp_path / "strong", scale_folder.scaling([1, 2, 4]))


def test_figures_draw_what_was_measured_beside_what_would_be_ideal(strong):
    by_name = {plot.name: plot for plot in plot_figures({"strong": read_results(strong)})}
    seconds, speed_up, split = by_name["scaling_seconds"], by_name["speed_up"], by_name["split"]
    assert isinstance(seconds, Curves) and isinstance(speed_up, Curves) and isinstance(split, Stack)
    (measured,) = seconds.curves
    assert (measured.x.tolist(), measured.y.tolist()) == ([1, 2, 4], [8, 4, 2])
    assert [curve.y.tolist() for curve in speed_up.curves] == [[1, 2, 4], [1, 2, 4]]
    assert list(split.parts) == list(PARTS) and np.sum(list(split.parts.values()), axis=0).tolist() == [8, 4, 2]


def test_report_makes_the_page_the_figures_and_a_latex_table(strong, capfd):
    assert main(["report", str(strong)]) == 0
    assert capfd.readouterr().out == f"{strong}/scale.html\n"
    page = (strong / "scale.html").read_text()
    drawn = page.split('<script type="application/json"')[0]
    assert drawn.count("<svg") == 5 and "<script src" not in page and "default-src 'none'" in page
    assert "http" not in re.sub("http-equiv|http://www.w3.org/[a-z0-9/]+", "", drawn)
    assert "Old Faithful, 8 cores" in page and "class=wrong" not in page
    for name in ("scaling_seconds", "speed_up", "split", "memory", "bytes"):
        assert {path.suffix for path in (strong / "figures").glob(f"{name}.*")} == {".csv", ".png", ".svg", ".pdf"}
        assert f'href="figures/{name}.pdf"' in page
    latex = (strong / "scale.tex").read_text()
    assert r"\begin{tabular}" in latex and "4 & 2.000 & 2.000-2.000 & 4.00 & 1.00" in latex


def test_a_report_made_again_replaces_its_files_which_stay_whole_until_then(strong, tmp_path):
    words = ["report", str(strong), "--out", str(tmp_path / "page")]
    assert main(words) == 0
    shutil.copytree(tmp_path / "page", tmp_path / "before", copy_function=os.link)
    assert main(words) == 0
    assert {path.stat().st_nlink for path in (tmp_path / "page").rglob("*.*")} == {1}, "another file each"


def test_experiments_lie_over_each_other_and_faults_stand_out(strong, tmp_path, capfd):
    scaling = scale_folder.scaling([1, 2, 4])
    weak = scale_folder.measured(tmp_path / "other", scaling, digest=lambda run: str(run.ranks == 4))
    records.record_failure(runs(scaling)[1], weak, "no memory is left")
    assert main(["report", str(strong), str(weak), "--out", str(tmp_path / "both")]) == 1
    shown = capfd.readouterr()
    assert (
        "other: results differ between ranks or repeats on 4 ranks" in shown.err
        and "other: 2 ranks, repeat 1: no memory is left" in shown.err
    )
    assert (tmp_path / "both" / "scale.html").read_text().count("class=wrong") == 2
    assert "Where the seconds go: other" in (tmp_path / "both" / "scale.html").read_text(), "a figure for each"
    with open(tmp_path / "both" / "figures" / "speed_up.csv", newline="") as file:
        assert {line["curve"] for line in csv.DictReader(file)} == {"strong", "other", "ideal"}


def test_what_no_checkpoint_vouches_for_is_said_below_the_tables_and_on_the_page(tmp_path, capsys):
    scaling = scale_folder.scaling([1], repeats=1)
    out, run = scale_folder.measured(tmp_path / "s", scaling), runs(scaling)[0].run(tmp_path / "s")
    shutil.rmtree(run)
    quick_run.run(quick_run.settings(training={"rounds": scale_folder.ROUNDS}), run)
    assert read_results(out).notes == []
    newest = run / f"round_{scale_folder.ROUNDS:05d}.h5"
    os.truncate(newest, 1000)
    assert main(["report", str(out)]) == 0
    note = "1 rank, repeat 1: metrics of round 4 are not vouched for by a checkpoint"
    assert note in (out / "scale.html").read_text() and f"% {note}\n" in (out / "scale.tex").read_text()
    scale._show(read_results(out))
    assert note in capsys.readouterr().out


def test_a_page_and_figures_of_others_are_not_replaced(strong, tmp_path, capfd):
    (tmp_path / "figures").mkdir()
    (figure := tmp_path / "figures" / "extrapolation.pdf").write_text("mine")
    (own := tmp_path / "scale.tex").write_text("mine")
    assert main(["report", str(strong), "--out", str(tmp_path)]) == 2
    assert own.read_text() == "mine" and f"{own} exists and is not known to be" in capfd.readouterr().err
    own.unlink()
    assert main(["report", str(strong), "--out", str(tmp_path)]) == 0 and figure.read_text() == "mine"


def test_pages_of_scaling_and_of_runs_may_share_a_folder(strong, tmp_path, capfd):
    quick_run.run(quick_run.settings(), tmp_path / "run")
    for path in (strong, tmp_path / "run", strong):
        assert main(["report", str(path), "--out", str(tmp_path / "report")]) == 0, capfd.readouterr().err
    assert {"report.html", "scale.html"} <= {path.name for path in (tmp_path / "report").iterdir()}


def test_runs_and_experiments_are_not_mixed(strong, tmp_path, capfd):
    assert main(["report", str(strong), str(tmp_path)]) == 2
    assert "is a scaling experiment, and" in capfd.readouterr().err
    assert main(["report", str(strong), "--target", "0.9"]) == 2
    assert "--target is for the report of runs" in capfd.readouterr().err


def test_an_experiment_without_a_run_says_why(tmp_path, capfd):
    scaling = scale_folder.scaling([2], repeats=1)
    out = scale_folder.measured(tmp_path / "s", scaling)
    records.record_failure(runs(scaling)[0], out, "no memory is left")
    assert main(["report", str(out)]) == 2
    assert "nothing was measured" in (stderr := capfd.readouterr().err) and "no memory is left" in stderr

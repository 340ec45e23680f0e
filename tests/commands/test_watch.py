"""`pflmpi watch`: runs are followed by their files until they end."""

import os
import pty
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import fake_slurm
import processes
import quick_run
from pflmpi.analysis import report as analysis_report
from pflmpi.cli import main
from pflmpi.cluster import jobs, run_status, waiting
from pflmpi.commands import report, watch
from pflmpi.store import config_file, job_file, metrics_file
from pflmpi.store.run_lock import take
from pflmpi.sweep.lock import lock_sweep_folder


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(waiting, "_PAUSE", 0.05)
    monkeypatch.setattr(waiting, "_GRACE", 0.3)


def begin(run, rounds):
    run.mkdir(exist_ok=True)
    raw = {"algorithm": {"name": "fedavg"}, "data": {"name": "digits"}, "training": {"rounds": rounds}}
    config_file.write(run, yaml.safe_dump(raw))
    metrics_file.restart(run, 0)


def add(run, round):
    line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "accuracy_mean": f"0.{round}"}
    metrics_file.append(run, list(line.values()))


def test_each_round_is_a_line_until_the_run_ends(tmp_path, capsys):
    """One is complete; of the other, two rounds end while it is watched, and then its process does."""
    done, run = tmp_path / "done", tmp_path / "run"
    quick_run.run(quick_run.settings(), done)
    run.mkdir()

    def live():
        shown[0].wait(120)
        lock = take(run, {}, take_over=False)
        begin(run, 9)
        for number in (1, 2):
            add(run, number)
            shown[number].wait(120)
        lock.release()

    shown = {number: threading.Event() for number in (0, 1, 2)}
    thread = threading.Thread(target=live)
    summary = run_status.summarize_progress

    def summarize(state, job):
        if state is None or state.title.startswith("fedavg"):
            shown[0 if state is None else state.round].set()
        return summary(state, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_status, "summarize_progress", summarize)
        thread.start()
        assert main(["watch", str(done), str(run), "--every", "0.05"]) == 1
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"{done} ")] == [lines[0]] and "round 3 of 3" in lines[0]
    of_run = [line.removeprefix(f"{run}  ") for line in lines[1:]]
    assert of_run[0] == "not begun" and any(line.startswith("round 1 of 9, accuracy 10.00 %") for line in of_run)
    assert of_run[-1].startswith("round 2 of 9, accuracy 20.00 %") and "`pflmpi resume" in of_run[-1]
    assert main(["watch", str(done)]) == 0


def test_a_sweep_is_watched_from_before_its_first_cell_to_its_end(tmp_path, capsys):
    """One cell is done, then the sweep pauses; of another there is only the configuration when the sweep ends."""
    table, done = tmp_path / "sweep", tmp_path / "done"
    first, second = table / "A/x/seed0", table / "B/x/seed0"
    begin(done, 1)
    add(done, 1)
    (done / "round_00001.h5").touch()

    def live():
        time.sleep(0.5)
        first.parent.mkdir(parents=True)
        done.rename(first)
        time.sleep(1)
        second.parent.mkdir(parents=True)
        second.with_suffix(".yaml").touch()
        sweep.close()

    with ExitStack() as sweep:
        sweep.enter_context(lock_sweep_folder(table))
        threading.Thread(target=live).start()
        assert main(["watch", str(table), "--every", "0.05"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{table}  not begun" and lines[1].startswith(f"{first}  round 1 of 1")
    assert lines[2:] == [f"{second}  not begun"]


def test_a_job_that_ends_before_its_run_begins_is_watched_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "_QUEUE_PAUSE", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    run = tmp_path / "run"
    for folder in (run, tmp_path / "bin"):
        folder.mkdir()
    job_file.append(run, "12")
    fake_slurm.queue(tmp_path / "bin", fake_slurm.line("12", State="PENDING"))
    threading.Timer(0.5, fake_slurm.queue, [tmp_path / "bin"]).start()
    assert main(["watch", str(run), "--every", "0.05"]) == 3
    assert (tmp_path / "bin" / "queue").read_text() == ""


def test_a_folder_stands_for_its_runs_and_what_is_none_is_refused(tmp_path, capfd):
    for name in ("a", "b"):
        begin(tmp_path / name, 3)
        add(tmp_path / name, 1)
    assert main(["watch", str(tmp_path)]) == 1
    assert [Path(line.split("  ")[0]).name for line in capfd.readouterr().out.splitlines()] == ["a", "b"]
    assert main(["watch", str(tmp_path / "c")]) == 2 and main(["watch", str(tmp_path), "--every", "0"]) == 2
    assert capfd.readouterr().err.count("\n") == 2


def test_slurm_is_not_asked_about_runs_that_no_job_has_written(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "query_queue", lambda environ: pytest.fail("asked"))
    begin(tmp_path, 9)
    assert main(["watch", str(tmp_path), "--every", "0.05"]) == 3


def test_a_terminal_shows_a_table_with_a_sparkline(tmp_path):
    begin(tmp_path / "run", 9)
    for number in range(1, 9):
        add(tmp_path / "run", number)
    lead, follow = pty.openpty()
    command = [*processes.PFLMPI, "watch", str(tmp_path / "run")]
    done = processes.call(command, stdout=follow, env={**processes.ENVIRONMENT, "TERM": "xterm", "COLUMNS": "150"})
    os.close(follow)
    text = b""
    while b"ended" not in text:
        text += os.read(lead, 65536)
    os.close(lead)
    assert done.returncode == 3, done.stderr
    assert "▁▂▃▄▅▆▇█" in text.decode() and "8/9" in text.decode() and "80.00 % (8)" in text.decode()


def test_of_many_rounds_some_are_drawn_and_the_last_one():
    bars = watch.sparkline([0.0] * 999 + [1.0])
    assert len(bars) == 24 and bars == "▁" * 23 + "█"


def test_a_report_is_written_again_after_each_checkpoint_until_the_run_ends(tmp_path, monkeypatch, capsys):
    run, page, aside = tmp_path / "run", tmp_path / "report" / "report.html", tmp_path / "aside"
    quick_run.run(quick_run.settings(training={"rounds": 4}, checkpoint={"keep": 0}), run)
    metrics = metrics_file.path(run).read_text().splitlines(keepends=True)
    metrics_file.path(run).write_text("".join(metrics[:3]))  # after two rounds
    (run / "round_00004.h5").unlink()
    (run / "round_00003.h5").rename(aside)
    lock, pages, sleep = take(run, {}, take_over=False), [], time.sleep

    def look(seconds):
        """Stands for time: the third checkpoint comes, then the process ends."""
        pages.append(page.read_text())
        if len(pages) == 1:
            metrics_file.path(run).write_text("".join(metrics[:4]))
            aside.rename(run / "round_00003.h5")
        elif len(pages) == 2:
            lock.release()
        sleep(0.1)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=look))
    written, write = [], analysis_report.write_report  # whose sixth argument is the seconds until a reload
    monkeypatch.setattr(analysis_report, "write_report", lambda *words: (written.append(words[5]), write(*words))[1])
    assert main(["report", str(run), "--watch", "--out", str(page.parent)]) == 0
    assert written == [10, 10, 0]
    assert all('<meta http-equiv="refresh" content="10">' in text for text in pages[:2])
    assert "refresh" not in page.read_text()
    assert capsys.readouterr().out.splitlines() == [f"{page} is written again after each checkpoint", str(page)]


def test_a_report_of_a_sweep_gets_the_cells_that_begin_meanwhile(tmp_path, monkeypatch):
    first, second, page = tmp_path / "s/A/x/seed0", tmp_path / "s/B/x/seed0", tmp_path / "report" / "report.html"
    quick_run.run(quick_run.settings(), first)
    with ExitStack() as sweep:
        sweep.enter_context(lock_sweep_folder(tmp_path / "s"))

        def look(seconds):
            """Stands for time: a second cell comes, then the sweep ends."""
            sweep.close() if second.exists() else shutil.copytree(first, second)

        monkeypatch.setattr(report, "time", SimpleNamespace(sleep=look))
        assert main(["report", str(tmp_path / "s"), "--watch", "--out", str(page.parent)]) == 0
    assert "B/x/seed0" in page.read_text()

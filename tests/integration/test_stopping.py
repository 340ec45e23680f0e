"""A run that is asked to stop ends after a complete round, with exit code 75, and continues to the same bits."""

import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
from pflmpi.cli import main
from pflmpi.errors import Stopped, write_exit_code
from pflmpi.runtime.stopping import Stop, noted_signals
from pflmpi.store import run_folder, verify
from pflmpi.transports.slurm import find_end_of_job
from project import ROOT

ROUNDS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A configuration whose rounds take a while, and the digest of its undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    raw = quick_run.settings(training={"rounds": ROUNDS, "epochs": 20}, checkpoint={"every": 5})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path, quick_run.run(raw, folder / "run")


def start(config: Path, run: Path, way: str, ranks: int) -> "subprocess.Popen[str]":
    """Start a run and wait until its second round is done."""
    command = [*processes.start_way(way, ranks), "run", str(config), "--out", str(run)]
    command += ["--ranks", str(ranks)] if way == "alone" else []
    process = processes.launch(command)

    def second_round() -> bool:
        return process.poll() is not None or len(lines(run)) > 2

    processes.wait_for(second_round, "the second round")
    assert process.poll() is None, process.communicate()
    return process


def lines(run: Path) -> list[str]:
    return (run / "metrics.csv").read_text().splitlines() if (run / "metrics.csv").exists() else []


def test_ranks_stop_after_their_round_when_the_process_that_started_them_is_killed(whole, tmp_path):
    config, expected = whole
    run = tmp_path / "run"
    process = start(config, run, "alone", 2)
    process.kill()
    _, err = process.communicate(timeout=processes.PATIENCE)  # until the ranks have ended, too
    assert "pflmpi: the process that started the ranks ended: stopped after round" in err
    assert run_folder.rounds(run)[-1] == len(lines(run)) - 1 < ROUNDS
    again = processes.call([*processes.PFLMPI, "resume", str(run), "--ranks", "1"])
    assert again.returncode == 0, again.stderr
    assert quick_run.digest(run) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ranks", "number"),
    [
        ("alone", 1, signal.SIGTERM),
        ("alone", 1, signal.SIGHUP),
        ("alone", 2, signal.SIGTERM),
        ("alone", 2, signal.SIGHUP),
        ("alone", 2, signal.SIGUSR2),
        ("mpi", 3, signal.SIGUSR1),
    ],
)
def test_a_signal_ends_the_run_after_the_round(way, ranks, number, whole, tmp_path):
    config, expected = whole
    run = tmp_path / "run"
    process = start(config, run, way, ranks)
    process.send_signal(number)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == Stopped.exit_code, err
    stopped_at = len(lines(run)) - 1
    assert f"{number.name} came: stopped after round {stopped_at}; `pflmpi resume {run}` continues" in err
    assert run_folder.rounds(run)[-1] == stopped_at < ROUNDS, (
        "the last round is a checkpoint, whatever checkpoint.every"
    )
    again = processes.call([*processes.PFLMPI, "run", str(config), "--out", str(run), "--continue", "--ranks", "1"])
    assert again.returncode == 0, again.stderr
    assert quick_run.digest(run) == expected


def test_under_nohup_a_run_outlives_its_terminal(tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 40})))
    words = ["run", str(config), "--out", str(run), "--ranks", "2"]
    process = processes.launch(["nohup", *processes.PFLMPI, *words])
    processes.wait_for(lambda: process.poll() is not None or len(lines(run)) > 1, "the first round")
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == 0, err
    assert len(lines(run)) == 41


@pytest.mark.slow
def test_one_rank_that_gets_the_signal_stops_all(whole, tmp_path):
    process = start(whole[0], tmp_path / "run", "mpi", 3)
    os.kill(processes.ranks_of(process.pid)[-1], signal.SIGUSR1)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == Stopped.exit_code, err
    assert "another rank was asked to stop: stopped after round" in err or "SIGUSR1 came: stopped after round" in err


@pytest.mark.slow
def test_the_second_signal_ends_the_run_at_once(tmp_path):
    raw = quick_run.settings(training={"rounds": 2, "epochs": 100000})  # the round never ends
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    run = tmp_path / "run"
    process = processes.launch([*processes.PFLMPI, "run", str(config), "--out", str(run), "--ranks", "1"])
    processes.wait_for(lambda: 0 in run_folder.rounds(run), "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)  # a second signal within one second is the same wish
    assert process.poll() is None, "the first one waits for the round"
    # Again and again: a loaded machine may have told the process of the first one just now.
    processes.wait_for(lambda: process.poll() is not None or process.send_signal(signal.SIGTERM), "the end", every=0.2)
    process.communicate(timeout=processes.PATIENCE)  # closes its pipes
    assert process.returncode == Stopped.exit_code
    assert verify.find_newest_good(run) == (0, [])
    assert not (run / "lock.json").exists(), "another host would wait for a sign of this one"


@pytest.mark.parametrize("file", ["code", "missing/code"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_during_start_up_ends_a_run_that_has_not_begun(number, file, tmp_path):
    """An import that waits inside a library, as torch's does, runs no handler of Python's."""
    (tmp_path / "torch.py").write_text(
        "import ctypes, sys\nprint('importing', flush=True)\n"
        "while True: ctypes.CDLL(None).poll(None, 0, 60000)\n"  # a signal ends poll, and the loop begins it again
    )
    environment = {**processes.ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PFLMPI_EXIT_FILE": file}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings()))
    process = processes.launch([*processes.PFLMPI, "run", str(config)], env=environment, cwd=tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, err) == (75, f"pflmpi: {number.name} came before the run had begun; start it again\n")
    assert file != "code" or (tmp_path / file).read_text() == "75\n"


def test_the_75_of_a_rank_outlasts_lost(tmp_path):
    file = tmp_path / "code"
    file.write_text("0\n")  # of a run before, by the same launcher
    rank_0, rank_1 = ({"PFLMPI_EXIT_FILE": str(file), "SLURM_PROCID": rank} for rank in "01")
    write_exit_code(rank_0, "lost")
    assert file.read_text() == "lost\n"
    write_exit_code(rank_1, Stopped.exit_code)
    write_exit_code(rank_0, "lost")
    assert file.read_text() == "75\n"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("word", ["run", "script"])
def test_a_run_whose_end_could_not_be_told_to_its_wrapper_does_not_begin(word, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings()))
    (tmp_path / "own.py").write_text("import pflmpi\npflmpi.run('config.yaml', out='run', ranks=1)\n")
    command = [*processes.PFLMPI, "run", "config.yaml", "--out", "run"] if word == "run" else [sys.executable, "own.py"]
    environment = {**processes.ENVIRONMENT, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    done = processes.call(command, env={**environment, "PFLMPI_EXIT_FILE": "gone/code"}, cwd=tmp_path)
    assert "cannot write gone/code, which tells launch/ how the ranks end: No such file or dir" in done.stderr
    assert not (tmp_path / "run").exists() and done.returncode == (2 if word == "run" else 1)


def test_the_same_wish_sent_twice_is_one():
    code = """
import os, signal, time
from pflmpi.runtime.stopping import Stop, noted_signals
stop = Stop()
with noted_signals(stop):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.reason:
        time.sleep(0.01)
    time.sleep(0.3)
print(stop.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=processes.PATIENCE)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1 came\n") or done.stdout == "SIGTERM came\n", done.stderr


def test_sigterm_after_a_death_ends_at_once_with_a_fault():
    code = """
import os, signal, time
from pflmpi.runtime.stopping import Stop, noted_signals
with noted_signals(Stop(), lambda: True):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=processes.PATIENCE).returncode == 3


def test_signals_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals(Stop()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_job_stops_when_two_more_rounds_and_the_spare_time_do_not_fit():
    stop = Stop(end=time.time() + 100, spare=30)
    stop.round_took(20)
    assert stop.reason == "", "2 x 20 + 30 fit into 100"
    stop.round_took(10)
    assert stop.reason == ""
    stop.round_took(40)
    assert stop.reason == "the job's time limit is near", "2 x 40 + 30 do not"


def test_outside_of_a_job_there_is_no_end():
    assert find_end_of_job({}) is None
    assert find_end_of_job({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "4000000000"}) == 4e9


def test_the_end_of_a_job_that_is_over_stops_nothing_and_is_said(caplog):
    assert find_end_of_job({"SLURM_JOB_ID": "999", "SLURM_JOB_END_TIME": "1500000000"}) is None
    assert re.search("job 999 ended at 2017-07-1.*; unset SLURM_JOB_ID and SLURM_JOB_END_TIME", caplog.text)


def test_the_end_of_a_job_is_what_squeue_says(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\n"
        "[ -z $SLURM_TIME_FORMAT$SQUEUE_STATES ] && [ $2 = --jobs=7 ] && echo 2096-10-02T09:00:00 || echo NONE\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    end = time.mktime(time.strptime("2096-10-02 09:00", "%Y-%m-%d %H:%M"))
    assert find_end_of_job({**os.environ, "SLURM_JOB_ID": "7"}) == end
    assert find_end_of_job({**os.environ, "SLURM_JOB_ID": "8"}) is None


def exit_code(words: list[str]) -> object:
    """Of a command in this process."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code


def test_continue_needs_a_folder_and_starts_where_nothing_is(tmp_path, capfd):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 1})))
    words = ["run", str(tmp_path / "config.yaml"), "--ranks", "1", "--continue"]
    assert exit_code(words) == 2 and "--continue without --out" in capfd.readouterr().err
    words += ["--out", str(tmp_path / "run")]
    assert exit_code(words) == exit_code(words) == 0, "the second one finds it done"
    assert exit_code([*words, "-s", "training.lr=0.3"]) == 2
    assert "training.lr = 0.1 in the run, 0.3 now" in capfd.readouterr().err


def test_an_interrupt_within_a_callback_of_python_is_not_lost():
    class Value:
        pass

    with pytest.raises(KeyboardInterrupt), noted_signals(Stop()):
        value = Value()
        reference = weakref.ref(value, lambda _: signal.raise_signal(signal.SIGINT))
        del value  # Python drops what the callback raises
        assert reference() is None
        for _ in range(100):
            time.sleep(0.1)
        pytest.fail("nothing was raised")

"""`pflmpi status`: recorded answers of Slurm, folders of runs, and a real Slurm."""

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import fake_slurm
import pflmpi
import processes
import quick_run
import testbed
from pflmpi.cli import main
from pflmpi.cluster import jobs, waiting
from pflmpi.cluster.batch_script import parse_time
from pflmpi.cluster.job_log import find_last_error
from pflmpi.cluster.jobs import Job
from pflmpi.cluster.run_status import RunStatus, format_progress, read_run_status, summarize_progress
from pflmpi.cluster.status import format_headline
from pflmpi.config.yaml_file import dump
from pflmpi.store import config_file, events_file, job_file, metrics_file, run_lock, verify
from pflmpi.store.job_file import End, Start, Submission
from pflmpi.store.run_lock import Owner, take
from pflmpi.sweep.lock import lock_sweep_folder

PATIENCE = 200.0  # seconds that a job may need to start and to run its first rounds


def job(id="12", **changes):
    (job,) = jobs.parse_queue(fake_slurm.line(id, **changes).encode())
    return job


def far(**changes):
    """A run of 30 rounds after the 12th, at 10 s each."""
    values = dict(title="fedgmh on digits", round=12, rounds=30, last=0.5, best=(0.75, 9), checkpoint=12)
    return RunStatus(**{**values, "per_round": 10.0, "age": 3.0, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three rounds."""
    folder = tmp_path_factory.mktemp("status") / "my run"
    quick_run.run(quick_run.settings(), folder)
    return folder


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder for commands of Slurm; nothing else is found."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def record(folder, job, restarts="-"):
    """Record a job in the folder of its run or, of an array, of its sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file.append(folder, job, restarts)
    return folder


# --- what Slurm says ----------------------------------------------------------------------------------------------


def test_a_job_is_read_as_squeue_prints_it():
    assert job(RestartCnt=2, exit_code=75 << 8, Reason="Gründe") == Job(
        id="12",
        number="12",
        state="RUNNING",
        reason="Gründe",
        nodes="2",
        node_list="node[1-2]",
        restarts=2,
        exit_code=75,
        seconds=600.0,
        limit=3600.0,
        allocated={"cpu": "4", "mem": "300M", "node": "2", "gres/gpu": "2"},
        directory="/home/me",
        log=Path("/home/me/my logs/12.log"),
    )


def test_an_array_is_read_task_by_task_and_what_waits_comes_last():
    lines = [fake_slurm.line(id) for id in ("3_[2,4-5%2]", "3_10", "3_1", "2")]
    queued = jobs.parse_queue("".join(["CLUSTER: far\n", *lines]).encode())
    assert [queued_job.id for queued_job in queued] == ["2", "3_1", "3_10", "3_[2,4-5%2]"]
    assert [queued_job.tasks for queued_job in queued] == [[], [1], [10], [2, 4, 5]]
    assert [queued_job.array for queued_job in queued] == ["", "3", "3", "3"]
    assert queued[-1].log is None, "tasks that wait together have no log"


def test_a_job_is_read_as_sacct_prints_it():
    times = "00:10:00|UNLIMITED|2030-01-02T14:53:04"
    text = f"12|12|CANCELLED by 1000|2|node[1-2]|75:0|{times}|cpu=4,mem=1G|01:02.345|/home/me\n"
    text += f"12.batch|12.batch|CANCELLED|1|node1|0:0|{times}|cpu=2|00:02|/home/me\n"
    (accounted,) = jobs.parse_accounted(text.encode())
    assert (accounted.allocated, accounted.cpu_seconds) == ({"cpu": "4", "mem": "1G"}, 62)
    assert (accounted.state, accounted.nodes, accounted.exit_code, accounted.seconds) == ("CANCELLED", "2", 75, 600.0)
    assert (accounted.limit, accounted.directory, accounted.restarts) == (None, "/home/me", 0)


def test_a_start_in_a_job_of_slurm_is_recorded(tmp_path):
    job_file.append(tmp_path, "12")
    assert job_file.read_restarts(tmp_path) == {"12": 0}
    for restarts in (0, 2):
        job_file.record(tmp_path, {"Slurm job 12": restarts, "torchrun a": 5}, None)
    job_file.record(tmp_path, {"Slurm job 7": 0}, None)
    job_file.record(tmp_path, {}, None)
    host = socket.gethostname()
    assert (tmp_path / "jobs.txt").read_text() == f"12 - {host}\n12 0 {host}\n12 2 {host}\n7 0 {host}\n"
    with (tmp_path / "jobs.txt").open("a") as file:
        file.write("torn 1")
    assert list(job_file.read_restarts(tmp_path).items()) == [("12", 2), ("7", 0)]


def test_a_start_says_in_a_line_what_runs_where_and_the_end_what_was_used(tmp_path, monkeypatch, capfd):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    variables = {"JOB_ID": "12", "RESTART_COUNT": "1", "JOB_NUM_NODES": "2", "JOB_CPUS_PER_NODE": "4(x2)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run, host = tmp_path / "run", socket.gethostname()
    assert quick_run.command(["run", str(tmp_path / "small.yaml"), "--out", str(run), "--ranks=1", "--quiet"]) == 0
    out, err = capfd.readouterr()
    versions = f"pflmpi {pflmpi.__version__}, torch {torch.__version__}, {sys.executable}"
    assert err.startswith(f"{versions}; 1 rank on {host}; Slurm job 12, restart 1\n")
    (used,) = re.findall("^used: (.*)$", out, re.MULTILINE)
    assert re.fullmatch(rf"0\.0\d node hours, 0\.\d\d core hours \(\d+% busy\); job 12 \(1 restart\) on {host}", used)
    usage = job_file.compute_usage(run)
    assert usage is not None and usage.starts == 1 and "whose end is unknown" not in usage.text
    line = json.loads((run / "jobs.txt").read_text().splitlines()[0].split(maxsplit=3)[3])
    assert (line["cores"], line["folder"]) == (8, run.stat().st_ino)


def used(folder, job, token, began, ended=None, cpu_seconds=None, gpus=0):
    """Record a start on two nodes of four cores each, and its end."""
    start = Start(began, ("a", "b"), 8, 2, 8, gpus, "python", "1", "2", token)
    job_file.record(folder, {f"Slurm job {job}": 0}, start)
    if ended is not None:
        job_file.record(folder, {f"Slurm job {job}": 0}, End(token, ended, cpu_seconds))


def test_hours_are_those_of_all_starts_whose_end_is_known(tmp_path):
    assert job_file.compute_usage(tmp_path) is None
    used(tmp_path, 12, "x", 0, 1800, 7200, gpus=4)
    used(tmp_path, 13, "y", 5000, 6800, 0)
    usage = "2.00 node hours, 8.00 core hours (25% busy), 2.00 GPU hours"  # 2 of 8
    assert str(job_file.compute_usage(tmp_path)) == f"{usage}; job 12 (0 restarts), 13 (0 restarts) on a, b"
    used(tmp_path, 14, "z", 9000)
    assert str(job_file.compute_usage(tmp_path)).startswith(f"{usage}, without 1 start whose end is unknown; job 12")
    for torn in ('{"token": "z"', '{"token": 3, "ended": 1}', '{"token": "z", "ended": "long ago"}', "[]"):
        with (tmp_path / "jobs.txt").open("a") as file:
            file.write(f"14 0 a {torn}\n")
    assert str(job_file.compute_usage(tmp_path)).startswith(f"{usage}, without 1 start")
    used(tmp_path, 16, "by a clock that was set back", 9000, 5400)
    assert str(job_file.compute_usage(tmp_path)).startswith(f"{usage}, without 2 starts whose end is unknown; job 12")
    used(tmp_path, 15, "killed", 20000, 21800)
    share = "3.00 node hours, 12.00 core hours (25% busy)"  # of those that have ended in order
    assert str(job_file.compute_usage(tmp_path)).startswith(share)


@pytest.mark.parametrize("behind", [0, 7200])
def test_a_start_that_was_killed_ended_when_its_lock_was_last_touched(behind, tmp_path, monkeypatch):
    """As the start that takes the lock over knows, also where the file server's clock is behind."""
    killed, now = Owner.here(tmp_path, {"Slurm job 12": 0}), time.time()
    used(tmp_path, 12, killed.token, now - 4600)
    (tmp_path / "lock.json").write_text(json.dumps(dataclasses.asdict(killed)))
    os.utime(tmp_path / "lock.json", (0, now - 1000))
    monkeypatch.setattr(run_lock, "read_mtime", lambda file: file.stat().st_mtime - behind)
    take(tmp_path, {"Slurm job 12": 1}, take_over=False).release()
    assert str(job_file.compute_usage(tmp_path)) == "2.00 node hours, 8.00 core hours; job 12 (0 restarts) on a, b"


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", "INVALID", ""])
def test_an_unlimited_time_is_none(text):
    assert parse_time(text) is None


# --- what the folder says -----------------------------------------------------------------------------------------


def test_a_run_that_is_deleted_meanwhile_is_none(run, tmp_path, monkeypatch):
    copy, read = shutil.copytree(run, tmp_path / "run"), verify.metrics
    monkeypatch.setattr(verify, "metrics", lambda *arguments: (read(*arguments), metrics_file.path(copy).unlink())[0])
    assert read_run_status(copy) is None


def test_a_run_is_read_from_its_folder(run):
    state = read_run_status(run)
    lines = metrics_file.read(run)
    assert state is not None and state.done and state.to_end == 0
    assert (state.title, state.round, state.rounds, state.checkpoint) == ("fedgmh on digits", 3, 3, 3)
    assert state.last == float(lines[-1]["accuracy_mean"])
    assert state.best is not None and state.best[0] == max(float(line["accuracy_mean"]) for line in lines)
    assert state.per_round == pytest.approx(sum(float(line["seconds"]) for line in lines[1:]) / 2)


@pytest.mark.parametrize("slow", [1, 3])
def test_the_first_round_of_a_process_does_not_count_for_the_speed(tmp_path, slow):
    write(tmp_path, rounds=9, done=4, slow=slow)
    state = read_run_status(tmp_path)
    assert state is not None and (state.per_round, state.to_end) == (2.0, 10.0)


def test_what_some_rounds_do_besides_counts_in_the_mean(tmp_path):
    write(tmp_path, rounds=9, done=1)
    for round in (2, 3, 4, 5):
        seconds = {"seconds": "6.0", "evaluation_seconds": "3.0", "checkpoint_seconds": "1.0"}
        line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "seconds": "2.0"}
        metrics_file.append(tmp_path, list((line | (seconds if round == 4 else {})).values()))
    state = read_run_status(tmp_path)
    assert state is not None and state.per_round == 2.0 + 4.0 / 4


def test_rounds_whose_metrics_are_lost_do_not_count_for_the_speed(tmp_path):
    write(tmp_path, rounds=9, done=0)
    metrics_file.path(tmp_path).unlink()
    metrics_file.restart(tmp_path, 5)
    state = read_run_status(tmp_path)
    assert state is not None and (state.round, state.per_round, state.to_end) == (5, None, None)
    for round in (6, 7):
        line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "seconds": "2.0"}
        metrics_file.append(tmp_path, list(line.values()))
    state = read_run_status(tmp_path)
    assert state is not None and (state.per_round, state.to_end) == (2.0, 4.0)


@pytest.mark.parametrize("rest", ["4,3", "4,3,0.5,0.5", "\0\0\0\0"])
def test_a_line_that_is_being_written_is_not_read(tmp_path, rest):
    write(tmp_path, rounds=9, done=3)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write(rest)
    state = read_run_status(tmp_path)
    assert state is not None and state.round == 3 and not state.done
    assert "metrics.csv ends in half a line after round 3" in state.notes


@pytest.mark.parametrize("rest", ["4,3\n", "4,3,0.5,x\n", "\n\n", "5" + ",0" * (len(metrics_file.COLUMNS) - 1) + "\n"])
def test_a_line_that_no_run_writes_is_said(tmp_path, fake, capfd, rest):
    write(tmp_path, rounds=9, done=3)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write(rest)
    assert main(["status", str(tmp_path)]) == 2
    assert "metrics.csv is damaged: line 5 " in capfd.readouterr().err


def test_a_run_that_has_just_begun_is_shown(tmp_path, fake, capsys):
    write(tmp_path, rounds=9, done=0)
    assert main(["status", str(tmp_path)]) == 0
    assert "round 0 of 9, no checkpoint yet" in capsys.readouterr().out


def test_a_run_can_be_read_while_it_writes(tmp_path):
    write(tmp_path, rounds=100, done=0)

    def go_on():
        """Do with the files what a run does, one that is continued every ten rounds."""
        for round in range(1, 101):
            line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "seconds": "1.5"}
            metrics_file.append(tmp_path, list(line.values()))
            (tmp_path / f"round_{round:05d}.h5").touch()
            (tmp_path / f"round_{round - 1:05d}.h5").unlink(missing_ok=True)
            if round % 10 == 0:
                metrics_file.restart(tmp_path, round)
                (tmp_path / "config.tmp").write_text((tmp_path / "config.yaml").read_text())
                os.replace(tmp_path / "config.tmp", tmp_path / "config.yaml")

    writer = threading.Thread(target=go_on)
    writer.start()
    seen = []
    while writer.is_alive() or not seen:
        state = read_run_status(tmp_path)
        assert state is not None
        seen.append(state.round)
    state = read_run_status(tmp_path)
    assert state is not None and state.done and seen == sorted(seen)


def write(folder, rounds, done, slow=0):
    """Write the files of a run that status reads, two seconds for each round but a slow one."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"algorithm": {"name": "fedavg"}, "data": {"name": "digits"}, "training": {"rounds": rounds}}
    config_file.write(folder, yaml.safe_dump(raw))
    metrics_file.restart(folder, 0)
    for round in range(1, done + 1):
        line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "accuracy_mean": f"0.{round}"}
        metrics_file.append(folder, list((line | {"seconds": "50.0" if round == slow else "2.0"}).values()))


# --- in words -----------------------------------------------------------------------------------------------------


def test_a_job_that_waits_says_why_and_for_what():
    line = format_headline(job(State="PENDING", Reason="Dependency", NodeList="", RestartCnt=1))
    assert line == "job 12 PENDING (Dependency), asks for 2 nodes, 1 restart"


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "FAILED", "CANCELLED", "OUT_OF_MEMORY", "PREEMPTED"])
def test_a_job_that_ended_too_early_says_how_to_continue(state):
    ended = job(State=state, Reason=state, exit_code=256)
    assert format_headline(ended) == f"job 12 {state} with exit code 1 on 2 nodes (node[1-2]), 0 restarts"
    assert "submit the same again" in list(format_progress(far(), ended))[-1]


def test_a_run_that_was_stopped_says_so():
    assert list(format_progress(far(), job(State="FAILED", exit_code=75 << 8)))[-1].startswith(
        "stopped after a complete round"
    )


def test_a_run_that_will_not_fit_says_by_how_much_and_what_to_do():
    short = job(TimeUsed="10:00", TimeLimit="12:00")  # 120 s left, 18 rounds of 10 s to go
    text = "\n".join(format_progress(far(), short))
    assert "10.00 s per round, the last one ended 0:00:03 ago, 0:03:00 to the end, 0:02:00 left of 0:12:00" in text
    assert "IT WILL NOT FIT: 0:01:00 too little, about 12 of the 18 rounds left" in text
    assert "--requeue" in text and "--time" in text
    assert "IT WILL NOT FIT" in summarize_progress(far(), short)


@pytest.mark.parametrize(
    "fitting",
    [
        job(TimeLimit="13:00"),
        job(TimeLimit="UNLIMITED"),
        job(State="PENDING", TimeUsed="0:00", TimeLimit="03:00"),
    ],
)
def test_a_run_that_fits_is_not_warned_of(fitting):
    assert "FIT" not in "\n".join([*format_progress(far(), fitting), summarize_progress(far(), fitting)])


@pytest.mark.parametrize("by", [{"requeues": True}, {"restarts": 1}], ids=str)
def test_a_job_that_requeues_itself_is_not_shouted_at(by):
    short = replace(job(TimeUsed="10:00", TimeLimit="12:00"), **by)
    text = "\n".join(format_progress(far(), short))
    assert "about 12 of the 18 rounds left end in time; then the job is requeued and continues" in text
    assert "IT WILL NOT FIT" not in text + summarize_progress(far(), short)


def test_a_finished_run_has_no_advice():
    lines = list(format_progress(far(round=30, checkpoint=30), job(State="COMPLETED")))
    assert lines[0].startswith("round 30 of 30") and len(lines) == 2 and "to the end" not in lines[1]


# --- the command --------------------------------------------------------------------------------------------------


def test_a_run_is_shown_where_there_is_no_slurm(run, fake, capsys):
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "fedgmh on digits" in out and "round 3 of 3, 1 rank, " in out and "job" not in out


def test_a_run_finds_its_job_by_its_jobs_txt(tmp_path, fake, capsys):
    write(tmp_path / "runs" / "a", rounds=9, done=3)
    run = record(tmp_path / "runs" / "a", "12")
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path), fake_slurm.line("13", WorkDir=tmp_path))
    for what in ([str(run)], [], ["12"]):
        assert main(["status", *what]) == 0
        out = capsys.readouterr().out
        assert out.startswith("job 12 RUNNING on 2 nodes (node[1-2]), 0 restarts\n")
        assert f"{run}: fedavg on digits" in out and "log: /home/me/my logs/12.log" in out
        assert ("1 other job of yours" in out) == (not what) and "job 13" not in out


def test_a_run_elsewhere_is_found_by_its_log(tmp_path, fake, capsys):
    run = record(tmp_path / "far" / "away" / "deep" / "a", "12")
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path, STDOUT=f"{run}.12.log"))
    assert main(["status"]) == 0
    assert f"  {run}: not begun\n" in capsys.readouterr().out


def test_a_copied_folder_has_not_the_jobs_of_its_original(tmp_path, fake, capfd):
    """It keeps their hours. One that was moved has its jobs, as has one that an older pflmpi wrote."""
    write(run := tmp_path / "runs" / "a", rounds=9, done=3)
    inode = run.stat().st_ino
    job_file.append(run, "12", record=Submission("log", folder=inode))
    job_file.record(run, {"Slurm job 12": 0}, Start(0, ("a",), 1, 1, 1, 0, "python", "1", "2", "x", inode))
    copy, moved = shutil.copytree(run, tmp_path / "runs" / "copy"), run.rename(tmp_path / "moved")
    job_file.record(
        copy, {"Slurm job 12": 0}, End("x", 3600)
    )  # as the next start there does, which finds a copied lock
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path))
    fake_slurm.program("scancel", f'echo "$@" > {tmp_path}/cancelled', fake)
    assert main(["cancel", str(copy)]) == 2 and "no job of yours works in" in capfd.readouterr().err
    assert main(["status", str(copy)]) == 0
    out = capfd.readouterr().out
    assert "used in 1 start: 1.00 node hours" in out and "job 12 (0 restarts)" in out and "job 12 RUNNING" not in out
    assert main(["cancel", str(moved)]) == 0
    record(copy, "12")
    assert main(["cancel", str(copy)]) == 2, "a line without a folder does not say otherwise"
    record(tmp_path / "old", "12", "1")
    assert main(["cancel", str(tmp_path / "old")]) == 0


def test_all_jobs_cost_one_squeue(tmp_path, fake, capsys):
    for number in range(10, 15):
        record(tmp_path / "runs" / str(number), str(number))
    fake_slurm.queue(fake, *(fake_slurm.line(str(number), WorkDir=tmp_path) for number in range(10, 15)))
    for name in ("squeue", "sacct", "scontrol"):
        fake_slurm.program(name, f"echo {name} >> {fake}/calls; /bin/cat {fake}/queue", fake)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.count("not begun") == 5
    assert (fake / "calls").read_text() == "squeue\n"


def test_a_run_whose_job_is_forgotten_is_shown_and_says_so(run, fake, capsys):
    fake_slurm.queue(fake)
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "round 3 of 3" in out and "Slurm forgets a job" in out and "used" not in out
    used(run, 12, "x", 0, 1800, 7200)
    assert main(["status", str(run)]) == 0
    hours = "1.00 node hours, 4.00 core hours (50% busy)"
    assert f"  used in 1 start: {hours}; job 12 (0 restarts) on a, b\n" in capsys.readouterr().out
    (run / "jobs.txt").unlink()


def test_an_ended_job_is_known_by_the_accounting_and_its_restarts_by_the_run(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a", rounds=9, done=3)
    record(tmp_path / "runs" / "a", "12", "2")
    fake_slurm.queue(fake)
    text = "12|12|TIMEOUT|2|node[1-2]|0:0|00:10:00|00:10:00|2030-01-02T14:53:04|cpu=8,mem=1G,gres/gpu=4|20:00|/home/me"
    fake_slurm.program("sacct", f'case "$*" in *--jobs=12*) echo "{text}" ;; esac', fake)
    assert main(["status", "runs/a"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job 12 TIMEOUT on 2 nodes (node[1-2]), 2 restarts\n") and "submit the same again" in out
    assert "  used: 0.33 node hours, 1.33 core hours (25% busy), 0.67 GPU hours\n" in out  # 20 of 80 minutes
    assert main(["status", "12"]) == 0
    assert f"{tmp_path}/runs/a: fedavg on digits" in capsys.readouterr().out


def test_of_the_jobs_of_a_run_only_what_counts_is_shown(tmp_path, fake, capsys):
    for number in ("11", "12"):
        record(tmp_path / "runs" / "a", number)
    ended, waiting = fake_slurm.line("11", State="TIMEOUT"), fake_slurm.line("12", State="PENDING", WorkDir=tmp_path)
    fake_slurm.queue(fake, ended, waiting)
    assert main(["status"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("job")] == ["12"]


def test_an_array_has_a_line_for_each_task_and_the_other_runs_of_its_sweep(tmp_path, fake, capsys):
    sweep = record(tmp_path / "sweep", "3")
    for row in ("A", "B"):
        write(sweep / row / "x" / "seed0", rounds=9, done=3)
    record(sweep / "A" / "x" / "seed0", "4", "0")
    fake_slurm.queue(
        fake,
        fake_slurm.line("3_[2-3%2]", State="PENDING", Reason="JobArrayTaskLimit"),
        fake_slurm.line("3_0", JobID=4, State="COMPLETED"),
        fake_slurm.line("3_1", JobID=5, State="FAILED", Reason="NonZeroExitCode"),
    )
    assert main(["status", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job 3, an array: 1 COMPLETED, 1 FAILED, 2 PENDING"
    assert lines[1].startswith(f"  3_0  COMPLETED  {sweep}/A/x/seed0  round 3 of 9")
    assert lines[2] == "  3_1  FAILED (NonZeroExitCode)  log: /home/me/my logs/12.log"
    assert lines[3] == "  3_[2-3%2]  PENDING (JobArrayTaskLimit)"
    assert lines[4] == f"runs in {sweep}:" and lines[5].startswith("  B/x/seed0  round 3 of 9") and len(lines) == 6
    assert main(["status", str(sweep / "A/x/seed0")]) == 0
    assert capsys.readouterr().out.startswith("job 3_0 COMPLETED")
    assert main(["status", "3_1"]) == 0
    assert capsys.readouterr().out.startswith("job 3_1 FAILED")


def test_a_task_with_several_cells_has_a_line_for_each(tmp_path, fake, monkeypatch, capsys):
    sweep = record(tmp_path / "sweeps" / "t", "3")
    for row in "ABC":
        write(sweep / row / "x" / "seed0", rounds=3, done=3)
        record(sweep / row / "x" / "seed0", "3", "0")
    for row in "AC":
        (sweep / row / "x" / "seed0" / "round_00003.h5").touch()
    (sweep / "B" / "x" / "seed0.log").write_text("pflmpi: no data here\n")
    (tmp_path / "log").write_text("failed: no data here\n")
    failed = fake_slurm.line("3_0", State="FAILED", Reason="NonZeroExitCode", STDOUT=tmp_path / "log", WorkDir=tmp_path)
    fake_slurm.queue(fake, failed, fake_slurm.line("3_[3,6]", State="PENDING", JobID=9))
    for what in ([str(sweep)], ["3"], []):
        assert main(["status", *what]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "job 3, an array: 1 FAILED, 2 PENDING"
        assert [line.partition("/x/seed0")[0] for line in lines[1:4]] == [
            f"  3_0  FAILED (NonZeroExitCode)  {sweep}/{row}" for row in "ABC"
        ]
        assert ["ended with: no data here" in line for line in lines[1:4]] == [False, True, False]
        assert lines[4].startswith("  3_[3,6]  PENDING") and len(lines) == 5
    fake_slurm.queue(fake, failed.replace("FAILED ", "RUNNING"))
    fake_slurm.program("scancel", f'echo "$@" > {tmp_path}/cancelled', fake)
    assert main(["cancel", str(sweep)]) == 0
    assert (tmp_path / "cancelled").read_text() == "3_0\n", "once"


def test_jobs_of_the_points_of_a_scaling_experiment_are_cancelled_with_it(tmp_path, fake, capsys):
    record(tmp_path / "sc" / "ranks-0002", "7")
    record(tmp_path / "sc" / "ranks-0004", "8")
    (tmp_path / "sc" / "scale.yaml").touch()
    fake_slurm.queue(fake, fake_slurm.line("7", State="COMPLETED"), fake_slurm.line("8"), fake_slurm.line("9"))
    fake_slurm.program("scancel", f'echo "$@" > {tmp_path}/cancelled', fake)
    assert main(["cancel", str(tmp_path / "sc")]) == 0
    assert (tmp_path / "cancelled").read_text() == "8\n"
    assert capsys.readouterr().out.startswith(f"job 8 cancelled (RUNNING): {tmp_path}/sc/ranks-0004\n")


OOM = "slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of your processes may have been\n"
CONSEQUENCES = "srun: error: node1: task 1: Out Of Memory\nslurmstepd: error: *** STEP 12.0 ON node1 CANCELLED ***\n"


def test_a_job_that_a_signal_ended_has_no_exit_code(fake, capsys):
    states = {"1": ("COMPLETED", 0), "2": ("FAILED", 9), "3": ("OUT_OF_MEMORY", 125), "4": ("FAILED", 75 << 8)}
    states["5"] = "PENDING", 75 << 8  # requeued
    for id, (state, status) in states.items():
        fake_slurm.queue(fake, fake_slurm.line(id, State=state, exit_code=status))
        assert main(["status", id, "--json"]) == 0
        (described,) = json.loads(capsys.readouterr().out)["jobs"]
        assert described["exit_code"] == {"1": 0, "4": 75}.get(id)


@pytest.mark.parametrize("state", ["FAILED", "OUT_OF_MEMORY"])
def test_a_job_that_memory_ran_out_for_says_the_limit_and_what_plan_counts(state, tmp_path, fake, capsys):
    run, log = tmp_path / "runs" / "a", tmp_path / "runs" / "a.12.log"
    run.mkdir(parents=True)
    log.write_text("round 1\n" + (OOM + CONSEQUENCES) * (state == "FAILED"))
    pattern = f"{tmp_path}/runs/a.%j.log"  # as squeue shows it
    fake_slurm.queue(fake, fake_slurm.line("12", State=state, exit_code=256, STDOUT=pattern, WorkDir=tmp_path))
    for memory, planned in ((0, "plan counts what it needs"), (3 << 30, "plan counted 3 GiB")):
        job_file.append(run, "12", record=Submission(str(log), memory=memory))
        assert main(["status"]) == 0
        out = capsys.readouterr().out
        assert f"  OUT_OF_MEMORY: the job had 300M on 2 nodes; {planned}" in out and f"  log: {log}\n" in out
        assert ("ended with: Detected 1 oom-kill event" in out) == (state == "FAILED")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("{ours}srun: error: node1: tasks 0,2: Terminated\n", "no data here"),
        ("{ours}srun: error: node1: task 1: Exited with exit code 2\nsrun: error: a: task 0: Killed\n", "no data here"),
        ("{ours}srun: error: a: task 2: Killed\nsrun: error: b: task 3: Killed\n", "a: task 2: Killed"),
        ("srun: error: a: task 2: Killed\nsrun: error: a: tasks 0-1: Terminated\n", "a: task 2: Killed"),
        ("{ours}slurmstepd: error: *** JOB 9 ON a CANCELLED AT 12:00 DUE TO JOB REQUEUE ***\n", "no data here"),
    ],
)
def test_an_error_is_told_from_what_slurm_says_of_the_other_ranks(log, cause, tmp_path):
    (tmp_path / "log").write_text(log.format(ours="pflmpi: no data here\n"))
    assert find_last_error(tmp_path / "log") == cause


def test_a_failed_task_says_why_as_long_as_slurm_knows_it(tmp_path, fake, capsys):
    sweep = record(tmp_path / "sweep", "3")
    (tmp_path / "log").write_text("cell 1: B/x/seed0: 0 of 9 rounds done\nfailed: no data here\n  B/x/seed0\n")
    lines = [fake_slurm.line(f"3_{task}", State="FAILED", STDOUT=tmp_path / "log") for task in (1, 2)]
    fake_slurm.queue(fake, *lines)
    assert main(["status", str(sweep)]) == 0
    assert capsys.readouterr().out.count("FAILED; ended with: no data here  log: ") == 2


def test_an_array_has_the_tasks_that_its_queue_has_forgotten(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = record(tmp_path / "sweeps" / "t", "3")
    done(sweep / "B/x/seed0")
    record(sweep / "B/x/seed0", "5", "0")
    fake_slurm.queue(fake, fake_slurm.line("3_1", JobID=5, State="COMPLETED", WorkDir=tmp_path))
    rest = "1|node1|2:0|00:10:00|UNLIMITED|2030-01-02T14:53:04|cpu=1|00:01|/home/me"
    accounted = f"3_0|4|FAILED|{rest}\n3_1|5|COMPLETED|{rest}"
    fake_slurm.program("sacct", f'case "$*" in *--jobs=3\\ *) echo "{accounted}" ;; esac', fake)
    for what in ("sweeps/t", "3"):
        assert main(["status", what, "--wait"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["job 3, an array: 1 FAILED, 1 COMPLETED", "  3_0  FAILED"]
        assert lines[2].startswith(f"  3_1  COMPLETED  {sweep}/B/x/seed0  round 3 of 3") and len(lines) == 3


@pytest.mark.parametrize("out", ["t", "papers/t", "far/away/papers/t"])
def test_a_job_finds_the_cells_of_an_array_wherever_its_sweep_is(out, tmp_path, fake, capsys):
    sweep = record(tmp_path / out, "3")
    for row, number in (("A", "4"), ("B", "5")):
        done(sweep / row / "x/seed0")
        record(sweep / row / "x/seed0", number, "0")
    tasks = ((f"3_{number - 4}", number) for number in (4, 5))
    lines = [fake_slurm.line(id, JobID=job, WorkDir=tmp_path, STDOUT=f"{sweep}.{id}.log") for id, job in tasks]
    fake_slurm.queue(fake, *lines)
    assert main(["status", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("  ")[3] for line in shown] == [f"{sweep}/{row}/x/seed0" for row in "AB"]


def test_cells_whose_tasks_are_forgotten_have_not_begun(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "sweep"
    done(sweep / "A/x/seed0")
    record(sweep / "A/x/seed0", "4", "0")
    write(sweep / "C/x/seed0", rounds=9, done=3)  # of another array
    cells = {"A/x/seed0": 0, "B/x/seed0": 1}
    job_file.append(sweep, "3", record=Submission("log", folder=sweep.stat().st_ino, cells=cells))
    fake_slurm.queue(fake, fake_slurm.line("3_0", JobID=4, State="COMPLETED", WorkDir=tmp_path))
    assert main(["status", str(sweep), "--wait"]) == 1
    assert "  B/x/seed0  not begun\n" in capsys.readouterr().out
    assert main(["status", "3", "--wait"]) == 1
    shutil.copytree(sweep, tmp_path / "copy")
    done(sweep / "B/x/seed0")
    assert main(["status", "3", "--wait"]) == 0, "a copy waits for nothing"


def test_the_accounting_is_not_asked_for_an_array_whose_tasks_are_all_in_the_queue(tmp_path, fake, capsys):
    sweep = tmp_path / "sweep"
    done(sweep / "A/x/seed0")
    job_file.append(sweep, "3", record=Submission("log", cells={"A/x/seed0": 0}))
    fake_slurm.queue(fake, fake_slurm.line("3_0", JobID=4, State="RUNNING", WorkDir=tmp_path))
    fake_slurm.program("sacct", f"touch {tmp_path}/asked", fake)
    assert main(["status", str(sweep)]) == 0
    assert "job 3" in capsys.readouterr().out and not (tmp_path / "asked").exists()


def test_a_sweep_of_which_no_cell_has_begun_is_one(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "sweeps" / "t"
    sweep.mkdir(parents=True)
    job_file.append(sweep, "3", record=Submission("log", cells={"A/x/seed0": 0, "B/x/seed0": 1}))
    lines = [fake_slurm.line(f"3_{task}", State="FAILED", exit_code=2 << 8, WorkDir=tmp_path) for task in (0, 1)]
    for known in (lines, []):
        fake_slurm.queue(fake, *known)
        assert main(["status", "3", "--wait"]) == 1
        capsys.readouterr()
        assert main(["status", "sweeps/t", "--wait", "--json"]) == 1
        runs = [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]]
        assert runs == [str(sweep / row / "x/seed0") for row in "AB"]


def done(run):
    """A run of three rounds, all of which are complete."""
    write(run, rounds=3, done=3)
    (run / "round_00003.h5").touch()


def test_members_of_a_forgotten_array_say_how_they_ended(tmp_path, fake, capsys):
    """One has run, one could not begin, one has not begun; the job of another failed before `pflmpi` did anything."""
    sweep, write_log = tmp_path / "sweep", lambda name, text: (tmp_path / name).write_text(text)
    write(sweep / "A/x/seed0", rounds=3, done=3)
    (sweep / "A/x/seed0/round_00003.h5").touch()
    for row in ("B", "C"):
        (sweep / row / "x").mkdir(parents=True)
        (sweep / row / "x" / "seed0.yaml").touch()
    write_log("sweep/A/x/seed0.log", "pflmpi: a warning\n")
    write_log("sweep/B/x/seed0.log", "pflmpi: no data here\nsrun: error: node1: task 0: Exited with exit code 2\n")
    write_log("sweep.3_1.log", "failed: no data here\n")
    write_log("sweep.3_2.log", "pflmpi: modules.sh ended with 1\n")
    write_log("sweep.3_0.log", "well\n")
    job_file.append(sweep, "3", record=Submission(f"{tmp_path}/sweep.3_%a.log"))
    fake_slurm.queue(fake)
    assert main(["status", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  A/x/seed0  round 3 of 3, accuracy 30.00 %") and "ended" not in lines[1]
    assert lines[2:4] == [
        f"  B/x/seed0  not begun; ended with: no data here  log: {sweep}/B/x/seed0.log",
        "  C/x/seed0  not begun",
    ]
    assert lines[4] == f"  a task ended with: modules.sh ended with 1  log: {tmp_path}/sweep.3_2.log"
    assert len(lines) == 6 and "Slurm forgets" in lines[5]


def test_a_run_whose_forgotten_job_wrote_nothing_says_how_it_ended(tmp_path, fake, capsys):
    (tmp_path / "run").mkdir()
    job_file.append(tmp_path / "run", "12", record=Submission(f"{tmp_path}/log"))
    (tmp_path / "log").write_text("pflmpi: no data here\n")
    fake_slurm.queue(fake)
    assert main(["status", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"{tmp_path}/run: not begun", "  ended with: no data here", f"  log: {tmp_path}/log"]


def test_files_of_a_stranger_lead_nowhere(tmp_path):
    sweep = record(tmp_path / "sweep", "3")
    os.mkfifo(tmp_path / "jobs.txt")  # which would wait for ever
    assert job_file.read_restarts(tmp_path) == {}
    (sweep / "jobs.txt").rename(tmp_path / "other")
    (sweep / "jobs.txt").symlink_to(tmp_path / "other")
    assert job_file.read_restarts(sweep) == {}


def test_cells_of_an_array_script_of_ones_own_are_known_by_their_starts(tmp_path, fake, capsys):
    for number, row in ((3, "B"), (4, "A")):  # the last task has the number of the array
        write(tmp_path / "sweeps" / "t" / row / "x" / "seed0", rounds=9, done=3)
        record(tmp_path / "sweeps" / "t" / row / "x" / "seed0", str(number), "0")
    lines = [fake_slurm.line(f"3_{task}", JobID=4 - task, WorkDir=tmp_path) for task in (0, 1)]
    fake_slurm.queue(fake, *lines)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert f"  3_0  RUNNING  {tmp_path}/sweeps/t/A/x/seed0  round 3 of 9" in out
    assert f"  3_1  RUNNING  {tmp_path}/sweeps/t/B/x/seed0  round 3 of 9" in out


def test_a_sweep_is_shown_without_a_job(run, tmp_path, fake, capsys):
    (tmp_path / "sweep/A/x").mkdir(parents=True)
    (tmp_path / "sweep/A/x/seed0").symlink_to(run)
    assert main(["status", str(tmp_path / "sweep")]) == 0
    assert "  A/x/seed0  round 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["nowhere", "notes.txt", "empty", "12_x", ""])
def test_a_name_that_is_neither_run_nor_job_is_refused(what, tmp_path, fake, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    fake_slurm.queue(fake)
    assert main(["status", what]) == 2
    error = capfd.readouterr()
    assert error.out == "" and error.err.count("\n") == 1 and "is not the folder of a run" in error.err


def test_a_job_that_slurm_does_not_know_is_refused(fake, capfd):
    fake_slurm.queue(fake, fake_slurm.line("77_4"))
    assert main(["status", "77_3"]) == 2
    error = capfd.readouterr()
    assert error.out == "" and "Slurm knows no job 77_3" in error.err


def test_a_forgotten_job_is_known_by_its_jobs_txt(run, tmp_path, fake, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/night", rounds=9, done=3)
    record(tmp_path / "runs/night", "77")
    record(tmp_path / "sweeps/table", "78")
    write(tmp_path / "sweeps/table/A/x/seed0", rounds=9, done=3)
    fake_slurm.queue(fake)
    for job, folder in (("77", "runs/night"), ("78", "sweeps/table"), ("78_0", "sweeps/table")):
        assert main(["status", job]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Slurm knows no job {job} any more; by its jobs.txt it was for {tmp_path}/{folder}\n")
        assert "round 3 of 9" in out
    assert main(["status", "7"]) == 2


def test_missing_slurm_is_reported(fake, capfd):
    assert main(["status"]) == 2
    assert "there is no Slurm here" in capfd.readouterr().err


def test_a_slurm_that_is_down_is_reported(fake, capfd):
    fake_slurm.program("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", fake)
    assert main(["status"]) == 3
    assert "Unable to contact slurm controller" in capfd.readouterr().err


def test_a_hanging_slurm_is_not_waited_for(run, fake, monkeypatch, capfd):
    monkeypatch.setattr(jobs, "TIME_LIMIT", 0.5)
    fake_slurm.program(
        "squeue", "/bin/sleep 299 & wait", fake
    )  # as in a site's wrapper: the one that hangs is not our child
    assert main(["status"]) == 3
    assert "did not answer" in capfd.readouterr().err
    assert main(["status", str(run)]) == 0
    out = capfd.readouterr().out
    assert "round 3 of 3" in out and "did not answer" in out and "name the folder" not in out


def test_filters_in_the_environment_hide_no_jobs(fake, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    fake_slurm.queue(fake, fake_slurm.line("12"))
    fake_slurm.program("squeue", f'[ -z "$SQUEUE_PARTITION" ] && /bin/cat {fake}/queue', fake)
    assert [queued_job.id for queued_job in jobs.query_queue(os.environ)] == ["12"]


def test_status_imports_no_torch():
    code = "import sys, pflmpi.cluster.waiting, pflmpi.commands.status; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- a real Slurm -------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.slow
def test_jobs_of_a_real_slurm(slurm, tmp_path, capsys):
    """One runs and takes too long, one waits for it, one has ended; the first is cancelled, and says how to go on."""
    configure(tmp_path, rounds=100000)
    running = submit(tmp_path, "first", "--time=5")
    waiting = submit(tmp_path, "second", f"--dependency=afterok:{running}", "-N2")
    ended = submit(tmp_path, "third", ranks=1, rounds=2)
    try:
        testbed.wait_until(ended, "COMPLETED", timeout=PATIENCE)
        testbed.wait_until(running, "RUNNING", timeout=PATIENCE)
        processes.wait_for(lambda: len(metrics_file.read(tmp_path / "first")) > 2, "the first rounds", PATIENCE)
        shown = blocks(capsys, [])
        assert shown[running].startswith(f"job {running} RUNNING on 1 node (node")
        assert " of 100000, 2 ranks, accuracy " in shown[running] and "left of 0:05:00" in shown[running]
        assert "IT WILL NOT FIT" in shown[running] and f"log: {tmp_path / 'first.log'}" in shown[running]
        assert shown[waiting].startswith(f"job {waiting} PENDING (Dependency), asks for 2 nodes, 0 restarts\n")
        assert f"{tmp_path / 'second'}: not begun" in shown[waiting]
        assert shown[ended].startswith(f"job {ended} COMPLETED") and "round 2 of 2" in shown[ended]
        assert list(blocks(capsys, [ended])) == list(blocks(capsys, [str(tmp_path / "third")])) == [ended]
    finally:
        subprocess.run(["scancel", waiting, running, ended], check=True, timeout=30)
    testbed.wait_until(running, "CANCELLED")
    assert "submit the same again, and it continues" in blocks(capsys, [running])[running]


@pytest.mark.slurm
@pytest.mark.slow
def test_an_array_of_a_real_slurm(slurm, tmp_path, capsys):
    configure(tmp_path, rounds=2)
    array = submit(tmp_path, "A/x/seed$SLURM_ARRAY_TASK_ID", "--array=1-3%1")
    record(tmp_path, array)
    try:
        testbed.wait_until(f"{array}_1", "COMPLETED", timeout=PATIENCE)
        lines = blocks(capsys, [str(tmp_path)])[array].splitlines()
    finally:
        subprocess.run(["scancel", array], check=True, timeout=30)
    assert lines[0].startswith(f"job {array}, an array: ") and "1 COMPLETED" in lines[0]
    assert lines[1].startswith(f"  {array}_1  COMPLETED  {tmp_path}/A/x/seed1  round 2 of 2, accuracy ")
    assert any("PENDING (JobArrayTaskLimit)" in line for line in lines)


def configure(folder, rounds):
    """Write a configuration that is quick to start."""
    raw = quick_run.settings(training={"rounds": rounds}, runtime={"executor": "loop"})
    (folder / "small.yaml").write_text(dump(raw))


def submit(folder, run, *options, ranks=2, rounds=None):
    """Submit a run below the folder, and return the job's id."""
    words = [f"{folder}/small.yaml --out {folder}/{run} --ranks {ranks} --quiet"]
    words += [f"-s training.rounds={rounds}"] if rounds else []
    command = " ".join(["srun", sys.executable, "-m", "pflmpi", "run", *words])
    array = any(option.startswith("--array") for option in options)
    output = f"--output={folder}/%A_%a.log" if array else f"--output={folder / run}.log"
    wrap = f"--wrap={command}"
    job = testbed.sbatch(f"--chdir={folder}", f"--ntasks={ranks}", output, *options, wrap, env=processes.ENVIRONMENT)
    if not array:
        record(folder / run, job)
    return job


def blocks(capsys, arguments):
    """What `pflmpi status` says of each job, by its id."""
    assert main(["status", *arguments]) == 0
    parts = re.split(r"^job ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return {part.split()[0].strip(","): f"job {part}" for part in parts}


def test_a_folder_of_runs_shows_them_and_their_jobs(tmp_path, fake, capsys):
    for name in ("a", "b"):
        write(tmp_path / "runs" / name, rounds=9, done=3)
    record(tmp_path / "runs" / "b", "12")
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path))
    assert main(["status", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("job 12 RUNNING") and lines[-1].startswith("  a  round 3 of 9")
    assert main(["status", str(tmp_path / "runs"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [run["running"] for run in listed["runs"]] == [False, True] and len(listed["jobs"]) == 1
    fake_slurm.queue(fake)
    assert main(["status", str(tmp_path / "runs" / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []


def test_status_and_watch_show_the_runs_that_compare_takes(run, tmp_path, fake, capsys):
    """Also those deep in a folder, and those whose config.yaml is lost."""
    runs = [tmp_path / "runs" / name for name in ("group/deep/one", "lost")]
    for folder in runs:
        shutil.copytree(run, folder)
    (runs[1] / "config.yaml").unlink()
    (runs[1] / "round_00003.h5").unlink()
    assert main(["compare", str(tmp_path / "runs")]) == 0
    capsys.readouterr()
    assert main(["status", str(tmp_path / "runs"), "--wait"]) == 1, "one is not done"
    assert re.findall("^  (\\S+)  round 3 of 3", capsys.readouterr().out, re.MULTILINE) == ["group/deep/one", "lost"]
    assert main(["watch", str(tmp_path / "runs")]) == 1
    assert re.findall("^(\\S+)  round 3 of 3", capsys.readouterr().out, re.MULTILINE) == [*map(str, runs)]
    assert main(["status", str(runs[1])]) == 0 and "fedgmh on digits" in capsys.readouterr().out


def test_a_run_without_checkpoint_and_configuration_has_not_begun(tmp_path):
    (tmp_path / "shards").mkdir()
    assert read_run_status(tmp_path) is None


def test_a_point_of_a_scaling_experiment_says_so_and_the_experiment_lists_its_runs(tmp_path, fake, capsys):
    experiment = tmp_path / "sc"
    point = record(experiment / "ranks-0002", "7")
    (experiment / "scale.yaml").write_text("repeats: 3\n")
    for name in ("repeat1", "repeat2"):
        write(point / name, rounds=3, done=3)
    (point / "repeat1" / "round_00003.h5").touch()
    fake_slurm.queue(fake, fake_slurm.line("7", State="COMPLETED", WorkDir=tmp_path))
    line = f"  {point}: a point of the scaling experiment in {experiment}, 1 of 3 repeats done\n"
    for what in ([], ["7"], [str(experiment)], [str(point)]):
        assert main(["status", *what]) == 0
        assert line in capsys.readouterr().out
    fake_slurm.queue(fake)
    assert main(["status", str(experiment)]) == 0
    assert "  ranks-0002/repeat1  round 3 of 3" in capsys.readouterr().out


def test_a_scaling_experiment_of_which_no_run_has_begun_says_so(tmp_path, fake, capsys):
    fake_slurm.queue(fake)
    (tmp_path / "scale.yaml").write_text("repeats: 3\n")
    assert main(["status", str(tmp_path)]) == 0
    assert f"{tmp_path}: a scaling experiment, of which no run has begun\n" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


# --- waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "code"), [([], 3), ([{"event": "end", "exit_code": 75}], 75), ([{"event": "x"}], 3)]
)
def test_waiting_for_a_process_ends_with_the_exit_code_of_its_run(events, code, tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_PAUSE", 0.05)
    monkeypatch.setattr(waiting, "_GRACE", 0.2)
    write(tmp_path, rounds=9, done=3)
    lock, seen = take(tmp_path, {}, take_over=False), []

    def end():
        seen.append(metrics_file.append(tmp_path, ["4", *["0"] * (len(metrics_file.COLUMNS) - 1)]))
        events_file.append(tmp_path, events)
        lock.release()

    threading.Timer(0.5, end).start()
    assert main(["status", str(tmp_path), "--wait"]) == code
    assert seen and "round 4 of 9" in capsys.readouterr().out


def test_a_run_that_is_done_is_not_waited_for_and_one_that_nobody_runs_neither(run, tmp_path, fake, capsys):
    assert main(["status", str(run), "--wait"]) == 0
    write(tmp_path / "a", rounds=9, done=3)
    assert main(["status", str(tmp_path / "a"), "--wait", "--json"]) == 3
    assert main(["status", str(tmp_path), "--wait"]) == 1
    assert main(["status", "--wait"]) == 2 and main(["status", str(tmp_path / "b"), "--wait"]) == 2


def test_waiting_for_a_run_waits_for_its_job(tmp_path, fake, capsys):
    write(tmp_path / "a", rounds=9, done=3)
    record(tmp_path / "a", "12")
    lines = [fake_slurm.line("12", WorkDir=tmp_path), fake_slurm.line("12", State="FAILED", exit_code=75 << 8)]
    for number, line in enumerate(lines):
        (fake / f"queue{number}").write_text(line)
    fake_slurm.program("squeue", f"/bin/cat {fake}/queue0; /bin/cp {fake}/queue1 {fake}/queue0", fake)
    assert main(["status", str(tmp_path / "a"), "--wait"]) == 75
    assert "job 12 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("end", "code"), [("COMPLETED", 0), ("FAILED", 1)])
@pytest.mark.parametrize("what", ["sweeps/t", "3"])
def test_of_a_sweep_count_the_cells_that_start_meanwhile_and_the_jobs_that_fail(
    what, end, code, tmp_path, fake, monkeypatch
):
    """A cell has a folder only when its task has started; a task may fail before that."""
    monkeypatch.chdir(tmp_path)
    sweep, later = record(tmp_path / "sweeps" / "t", "3"), tmp_path / "later"
    write(later / "x" / "seed0", rounds=3, done=3)
    (later / "x" / "seed0" / "round_00003.h5").touch()
    record(later / "x" / "seed0", "4", "0")
    begun = [fake_slurm.line("3_0", JobID=4, WorkDir=tmp_path), fake_slurm.line("3_[1]", WorkDir=tmp_path)]
    ended = [line.replace("RUNNING  ", state) for line, state in zip(begun, ("COMPLETED", f"{end:9}"), strict=True)]
    (fake / "first").write_text("".join(begun))
    (fake / "queue").write_text("".join(ended).replace("3_[1]", "3_1  "))
    look = f"/bin/cat {fake}/first && /bin/rm {fake}/first || {{ /bin/mv {later} {sweep}/A; /bin/cat {fake}/queue; }}"
    fake_slurm.program("squeue", f"({look}) 2> {fake}/errors", fake)
    assert main(["status", what, "--wait"]) == code


def test_a_job_whose_run_is_unknown_gives_its_own_exit_code(fake):
    fake_slurm.queue(fake, fake_slurm.line("12", State="FAILED", exit_code=2 << 8))
    assert main(["status", "12", "--wait"]) == 2


def test_a_local_sweep_is_waited_for_also_between_two_of_its_cells(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(waiting, "_PAUSE", 0.05)
    write(tmp_path / "A/x/seed0", rounds=3, done=3)
    (tmp_path / "A/x/seed0/round_00003.h5").touch()
    seen = []
    with ExitStack() as stack:
        stack.enter_context(lock_sweep_folder(tmp_path))
        threading.Timer(0.5, lambda: (seen.append("end"), stack.close())).start()
        assert main(["status", str(tmp_path), "--wait"]) == 0 and seen


@pytest.mark.parametrize("codes", [(3, 75), (75, 3), (3, 75, 3), (75, 3, 75)])
def test_of_several_jobs_of_a_run_the_last_gives_the_exit_code(codes, tmp_path, fake):
    write(tmp_path, rounds=9, done=3)
    lines = (fake_slurm.line(f"{12 + place}", State="FAILED", exit_code=code << 8) for place, code in enumerate(codes))
    fake_slurm.queue(fake, *lines)
    assert waiting.wait(["12", "13", "14"][: len(codes)], [tmp_path], os.environ, of_sweep=False) == codes[-1]


def test_a_lock_of_another_host_that_nobody_touches_is_left_behind(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    write(tmp_path, rounds=9, done=3)
    lock = take(tmp_path, {}, take_over=False)
    owner = json.loads((tmp_path / "lock.json").read_text()) | {"system": "another"}
    (tmp_path / "lock.json").write_text(json.dumps(owner))
    writers, states = waiting.Writers(), []
    for passed in (0, 59, 2):
        now[0] += passed
        states.append(writers.is_writing(tmp_path))
    assert states == [True, True, False]
    os.utime(tmp_path / "lock.json", (1, 1))
    assert writers.is_writing(tmp_path)
    lock.drop()

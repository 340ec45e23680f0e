"""`pflmpi status`: recorded answers of Slurm, folders of runs, and a real Slurm."""

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import fake_slurm
import processes
import quick_run
import testbed
from pflmpi.cli import main
from pflmpi.cluster import jobs
from pflmpi.cluster.folders import cells_file
from pflmpi.cluster.jobs import Job
from pflmpi.cluster.run_status import RunStatus, run_status
from pflmpi.cluster.sbatch import seconds
from pflmpi.cluster.status_text import headline, progress_lines, progress_summary
from pflmpi.config.yaml_file import dump
from pflmpi.store import job_file, metrics_file
from pflmpi.store.run_lock import take

PATIENCE = 200.0  # seconds that a job may need to start and to run its first rounds


def job(id: str = "12", **changes: object) -> Job:
    (job,) = jobs.parse_queue(fake_slurm.line(id, **changes).encode())
    return job


def far(**changes: object) -> RunStatus:
    """A run of 30 rounds after the 12th, at 10 s each."""
    values = dict(title="fedgmh on digits", round=12, rounds=30, accuracy=0.5, best=(0.75, 9), checkpoint=12)
    return RunStatus(**{**values, "per_round": 10.0, "age": 3.0, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds."""
    folder = tmp_path_factory.mktemp("status") / "my run"
    quick_run.run(quick_run.settings(), folder)
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands of Slurm; nothing else is found."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def record(folder: Path, job: str, restarts: str = "-", cells: str = "") -> Path:
    """Record a job in the folder of its run or, with cells, of its sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file.append(folder, job, restarts)
    if cells:
        cells_file(folder, job).write_text(cells)
    return folder


# --- what Slurm says ----------------------------------------------------------------------------------------------


def test_a_job_is_read_as_squeue_prints_it() -> None:
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
        directory="/home/me",
        log=Path("/home/me/my logs/12.log"),
    )


def test_an_array_is_read_task_by_task_and_what_waits_comes_last() -> None:
    lines = [fake_slurm.line(id) for id in ("3_[2,4-5%2]", "3_10", "3_1", "2")]
    found = jobs.parse_queue("".join(["CLUSTER: far\n", *lines]).encode())
    assert [one.id for one in found] == ["2", "3_1", "3_10", "3_[2,4-5%2]"]
    assert [one.tasks for one in found] == [[], [1], [10], [2, 4, 5]]
    assert [one.array for one in found] == ["", "3", "3", "3"]
    assert found[-1].log is None, "tasks that wait together have no log"


def test_a_job_is_read_as_sacct_prints_it() -> None:
    text = "12|12|CANCELLED by 1000|2|node[1-2]|75:0|00:10:00|UNLIMITED|2030-01-02T14:53:04|/home/me\n"
    (found,) = jobs.parse_accounted(text.encode())
    assert (found.state, found.nodes, found.exit_code, found.seconds) == ("CANCELLED", "2", 75, 600.0)
    assert (found.limit, found.directory, found.restarts) == (None, "/home/me", 0)


def test_a_start_in_a_job_of_slurm_is_recorded(tmp_path: Path) -> None:
    job_file.append(tmp_path, "12")
    assert job_file.read(tmp_path) == {"12": 0}
    for restarts in (0, 2):
        take(tmp_path, {"Slurm job 12": restarts, "torchrun a": 5}, take_over=False).release()
    take(tmp_path, {"Slurm job 7": 0}, take_over=False).release()
    take(tmp_path, {}, take_over=False).release()
    host = socket.gethostname()
    assert (tmp_path / "jobs.txt").read_text() == f"12 - {host}\n12 0 {host}\n12 2 {host}\n7 0 {host}\n"
    with (tmp_path / "jobs.txt").open("a") as file:
        file.write("torn 1")
    assert list(job_file.read(tmp_path).items()) == [("12", 2), ("7", 0)]


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", "INVALID", ""])
def test_an_unlimited_time_is_none(text: str) -> None:
    assert seconds(text) is None


# --- what the folder says -----------------------------------------------------------------------------------------


def test_a_run_is_read_from_its_folder(run: Path) -> None:
    state = run_status(run)
    lines = metrics_file.read(run)
    assert state is not None and state.done and state.to_end == 0
    assert (state.title, state.round, state.rounds, state.checkpoint) == ("fedgmh on digits", 3, 3, 3)
    assert state.accuracy == float(lines[-1]["accuracy_mean"])
    assert state.best is not None and state.best[0] == max(float(line["accuracy_mean"]) for line in lines)
    assert state.per_round == pytest.approx(sum(float(line["seconds"]) for line in lines[1:]) / 2)


def test_time_between_checkpoints_counts_if_it_is_longer_than_the_rounds_and_of_this_job(tmp_path: Path) -> None:
    write(tmp_path, rounds=9, done=3)
    for round, at in ((1, 1000), (2, 1007), (3, 1014)):
        (tmp_path / f"round_{round:05d}.h5").touch()
        os.utime(tmp_path / f"round_{round:05d}.h5", (at, at))
    states = [run_status(tmp_path, since) for since in (None, 900.0, 1010.0)]
    assert [state.per_round for state in states if state] == [2.0, 7.0, 2.0]
    assert [state.to_end for state in states if state] == [12.0, 42.0, 12.0]


def test_the_first_round_does_not_count_for_the_speed(tmp_path: Path) -> None:
    write(tmp_path, rounds=9, done=3, slow=1)
    state = run_status(tmp_path)
    assert state is not None and state.per_round == 2.0


def test_the_first_round_after_a_restart_does_not_count_for_the_speed(tmp_path: Path) -> None:
    write(tmp_path, rounds=9, done=4, slow=3)
    for round, at in ((2, 1000), (3, 1050), (4, 1052), (5, 1054)):
        (tmp_path / f"round_{round:05d}.h5").touch()
        os.utime(tmp_path / f"round_{round:05d}.h5", (at, at))
    state = run_status(tmp_path, 900.0)
    assert state is not None and state.per_round == 2.0


@pytest.mark.parametrize("rest", ["4,3", "4,3,0.5,0.5", "\0\0\0\0"])
def test_a_line_that_is_being_written_is_not_read(tmp_path: Path, rest: str) -> None:
    write(tmp_path, rounds=9, done=3)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write(rest)
    state = run_status(tmp_path)
    assert state is not None and state.round == 3 and not state.done
    assert "metrics.csv ends in half a line after round 3" in state.notes


@pytest.mark.parametrize("rest", ["4,3\n", "4,3,0.5,x\n", "\n\n", "5" + ",0" * (len(metrics_file.COLUMNS) - 1) + "\n"])
def test_a_line_that_no_run_writes_is_said(
    tmp_path: Path, fake: Path, capfd: pytest.CaptureFixture[str], rest: str
) -> None:
    write(tmp_path, rounds=9, done=3)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write(rest)
    assert main(["status", str(tmp_path)]) == 2
    assert "metrics.csv is damaged: line 5 " in capfd.readouterr().err


def test_a_run_that_has_just_begun_is_shown(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, rounds=9, done=0)
    assert main(["status", str(tmp_path)]) == 0
    assert "round 0 of 9, no checkpoint yet" in capsys.readouterr().out


def test_a_run_can_be_read_while_it_writes(tmp_path: Path) -> None:
    write(tmp_path, rounds=100, done=0)

    def go_on() -> None:
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
        state = run_status(tmp_path, since=0.0)
        assert state is not None
        seen.append(state.round)
    state = run_status(tmp_path)
    assert state is not None and state.done and seen == sorted(seen)


def write(folder: Path, rounds: int, done: int, slow: int = 0) -> None:
    """Write the files of a run that status reads, two seconds for each round but a slow one."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"algorithm": {"name": "fedavg"}, "data": {"name": "digits"}, "training": {"rounds": rounds}}
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    metrics_file.restart(folder, 0)
    for round in range(1, done + 1):
        line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "accuracy_mean": f"0.{round}"}
        metrics_file.append(folder, list((line | {"seconds": "50.0" if round == slow else "2.0"}).values()))


# --- in words -----------------------------------------------------------------------------------------------------


def test_a_job_that_waits_says_why_and_for_what() -> None:
    line = headline(job(State="PENDING", Reason="Dependency", NodeList="", RestartCnt=1))
    assert line == "job 12 PENDING (Dependency), asks for 2 nodes, 1 restart"


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "FAILED", "CANCELLED", "OUT_OF_MEMORY", "PREEMPTED"])
def test_a_job_that_ended_too_early_says_how_to_continue(state: str) -> None:
    ended = job(State=state, Reason=state, exit_code=256)
    assert headline(ended) == f"job 12 {state} with exit code 1 on 2 nodes (node[1-2]), 0 restarts"
    assert "submit the same again" in list(progress_lines(far(), ended))[-1]


def test_a_run_that_was_stopped_says_so() -> None:
    assert list(progress_lines(far(), job(State="FAILED", exit_code=75 << 8)))[-1].startswith(
        "stopped after a complete round"
    )


def test_a_run_that_will_not_fit_says_by_how_much_and_what_to_do() -> None:
    short = job(TimeUsed="10:00", TimeLimit="12:00")  # 120 s left, 18 rounds of 10 s to go
    text = "\n".join(progress_lines(far(), short))
    assert "10.00 s per round, the last one ended 0:00:03 ago, 0:03:00 to the end, 0:02:00 left of 0:12:00" in text
    assert "IT WILL NOT FIT: 0:01:00 too little, about 12 of the 18 rounds left" in text
    assert "--requeue" in text and "--time" in text
    assert "IT WILL NOT FIT" in progress_summary(far(), short)


@pytest.mark.parametrize(
    "fitting",
    [
        job(TimeLimit="13:00"),
        job(TimeLimit="UNLIMITED"),
        job(State="PENDING", TimeUsed="0:00", TimeLimit="03:00"),
    ],
)
def test_a_run_that_fits_is_not_warned_of(fitting: Job) -> None:
    assert "FIT" not in "\n".join([*progress_lines(far(), fitting), progress_summary(far(), fitting)])


def test_a_finished_run_has_no_advice() -> None:
    lines = list(progress_lines(far(round=30, checkpoint=30), job(State="COMPLETED")))
    assert lines[0].startswith("round 30 of 30") and len(lines) == 2 and "to the end" not in lines[1]


# --- the command --------------------------------------------------------------------------------------------------


def test_a_run_is_shown_where_there_is_no_slurm(run: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "fedgmh on digits" in out and "round 3 of 3, 1 rank, " in out and "job" not in out


def test_a_run_finds_its_job_by_its_jobs_txt(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "runs" / "a", rounds=9, done=3)
    run = record(tmp_path / "runs" / "a", "12")
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path), fake_slurm.line("13", WorkDir=tmp_path))
    for what in ([str(run)], [], ["12"]):
        assert main(["status", *what]) == 0
        out = capsys.readouterr().out
        assert out.startswith("job 12 RUNNING on 2 nodes (node[1-2]), 0 restarts\n")
        assert f"{run}: fedavg on digits" in out and "log: /home/me/my logs/12.log" in out
        assert ("1 other job of yours" in out) == (not what) and "job 13" not in out


def test_a_run_elsewhere_is_found_by_its_log(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "far" / "away" / "deep" / "a", "12")
    fake_slurm.queue(fake, fake_slurm.line("12", WorkDir=tmp_path, STDOUT=f"{run}.12.log"))
    assert main(["status"]) == 0
    assert f"  {run}: not begun\n" in capsys.readouterr().out


def test_all_jobs_cost_one_squeue(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10, 15):
        record(tmp_path / "runs" / str(number), str(number))
    fake_slurm.queue(fake, *(fake_slurm.line(str(number), WorkDir=tmp_path) for number in range(10, 15)))
    for name in ("squeue", "sacct", "scontrol"):
        fake_slurm.program(name, f"echo {name} >> {fake}/calls; /bin/cat {fake}/queue", fake)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.count("not begun") == 5
    assert (fake / "calls").read_text() == "squeue\n"


def test_a_run_whose_job_is_forgotten_is_shown_and_says_so(
    run: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.queue(fake)
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "round 3 of 3" in out and "Slurm forgets a job" in out


def test_an_ended_job_is_known_by_the_accounting_and_its_restarts_by_the_run(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a", rounds=9, done=3)
    record(tmp_path / "runs" / "a", "12", "2")
    fake_slurm.queue(fake)
    text = "12|12|TIMEOUT|2|node[1-2]|0:0|00:10:00|00:10:00|2030-01-02T14:53:04|/home/me"
    fake_slurm.program("sacct", f'case "$*" in *--jobs=12*) echo "{text}" ;; esac', fake)
    assert main(["status", "runs/a"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job 12 TIMEOUT on 2 nodes (node[1-2]), 2 restarts\n") and "submit the same again" in out
    assert main(["status", "12"]) == 0
    assert f"{tmp_path}/runs/a: fedavg on digits" in capsys.readouterr().out


def test_of_the_jobs_of_a_run_only_what_counts_is_shown(
    tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("11", "12"):
        record(tmp_path / "runs" / "a", number)
    ended, waiting = fake_slurm.line("11", State="TIMEOUT"), fake_slurm.line("12", State="PENDING", WorkDir=tmp_path)
    fake_slurm.queue(fake, ended, waiting)
    assert main(["status"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("job")] == ["12"]


def test_an_array_has_a_line_for_each_cell(
    run: Path, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = record(tmp_path / "sweep", "3", cells="A/x/seed0\nB/x/seed0\nC/x/seed0\nD/x/seed0\nE/x/seed0\n")
    (sweep / "A/x").mkdir(parents=True)
    (sweep / "A/x/seed0").symlink_to(run)
    fake_slurm.queue(
        fake,
        fake_slurm.line("3_[2-3%2]", State="PENDING", Reason="JobArrayTaskLimit"),
        fake_slurm.line("3_0", JobID=4, State="COMPLETED"),
        fake_slurm.line("3_1", JobID=5, State="FAILED", Reason="NonZeroExitCode"),
    )
    assert main(["status", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job 3, an array: 1 COMPLETED, 1 FAILED, 2 PENDING"
    assert lines[2].startswith("  3_0  COMPLETED  A/x/seed0  round 3 of 3, accuracy ")
    assert lines[3] == "  3_1  FAILED (NonZeroExitCode)  B/x/seed0  not begun  log: /home/me/my logs/12.log"
    assert lines[4:6] == [f"  3_{n}  PENDING (JobArrayTaskLimit)  {'ABCD'[n]}/x/seed0  not begun" for n in (2, 3)]
    assert lines[6:] == ["  3_4  no longer in the queue  E/x/seed0  not begun"]
    assert main(["status", str(sweep / "B/x/seed0")]) == 0
    assert capsys.readouterr().out.startswith("job 3_1 FAILED")


def test_files_of_a_stranger_lead_nowhere(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = record(tmp_path / "sweep", "3", cells="../../other\n/etc\nA/x/seed0\n")
    fake_slurm.queue(fake, *(fake_slurm.line(f"3_{task}", State="COMPLETED") for task in range(3)))
    assert main(["status", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == ["  3_0  COMPLETED", "  3_1  COMPLETED", "  3_2  COMPLETED  A/x/seed0  not begun"]
    os.mkfifo(tmp_path / "jobs.txt")  # which would wait for ever
    assert job_file.read(tmp_path) == {}
    (sweep / "jobs.txt").rename(tmp_path / "other")
    (sweep / "jobs.txt").symlink_to(tmp_path / "other")
    assert job_file.read(sweep) == {}


def test_cells_of_an_array_script_of_ones_own_are_known_by_their_starts(
    tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, row in ((3, "B"), (4, "A")):  # the last task has the number of the array
        write(tmp_path / "sweeps" / "t" / row / "x" / "seed0", rounds=9, done=3)
        record(tmp_path / "sweeps" / "t" / row / "x" / "seed0", str(number), "0")
    lines = [fake_slurm.line(f"3_{task}", JobID=4 - task, WorkDir=tmp_path) for task in (0, 1)]
    fake_slurm.queue(fake, *lines)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert f"  3_0  RUNNING  {tmp_path}/sweeps/t/A/x/seed0  round 3 of 9" in out
    assert f"  3_1  RUNNING  {tmp_path}/sweeps/t/B/x/seed0  round 3 of 9" in out


def test_a_sweep_is_shown_without_a_job(
    run: Path, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep/A/x").mkdir(parents=True)
    (tmp_path / "sweep/A/x/seed0").symlink_to(run)
    assert main(["status", str(tmp_path / "sweep")]) == 0
    assert "  A/x/seed0  round 3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["nowhere", "notes.txt", "empty", "12_x", ""])
def test_a_name_that_is_neither_run_nor_job_is_refused(
    what: str, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    fake_slurm.queue(fake)
    assert main(["status", what]) == 2
    error = capfd.readouterr()
    assert error.out == "" and error.err.count("\n") == 1 and "is not the folder of a run" in error.err


def test_a_job_that_slurm_does_not_know_is_refused(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_slurm.queue(fake, fake_slurm.line("77_4"))
    assert main(["status", "77_3"]) == 2
    error = capfd.readouterr()
    assert error.out == "" and "Slurm knows no job 77_3" in error.err


def test_a_forgotten_job_is_known_by_its_jobs_txt(
    run: Path, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs/night", rounds=9, done=3)
    record(tmp_path / "runs/night", "77")
    record(tmp_path / "sweeps/table", "78", cells="A/x/seed0\n")
    write(tmp_path / "sweeps/table/A/x/seed0", rounds=9, done=3)
    fake_slurm.queue(fake)
    for job, folder in (("77", "runs/night"), ("78", "sweeps/table"), ("78_0", "sweeps/table")):
        assert main(["status", job]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Slurm knows no job {job} any more; by its jobs.txt it was for {tmp_path}/{folder}\n")
        assert "round 3 of 9" in out
    assert main(["status", "7"]) == 2


def test_missing_slurm_is_reported(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 2
    assert "there is no Slurm here" in capfd.readouterr().err


def test_a_slurm_that_is_down_is_reported(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_slurm.program("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", fake)
    assert main(["status"]) == 3
    assert "Unable to contact slurm controller" in capfd.readouterr().err


def test_a_hanging_slurm_is_not_waited_for(
    run: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "TIME_LIMIT", 0.5)
    fake_slurm.program(
        "squeue", "/bin/sleep 299 & wait", fake
    )  # as in a site's wrapper: the one that hangs is not our child
    assert main(["status"]) == 3
    assert "did not answer" in capfd.readouterr().err
    assert main(["status", str(run)]) == 0
    out = capfd.readouterr().out
    assert "round 3 of 3" in out and "did not answer" in out and "name the folder" not in out


def test_filters_in_the_environment_hide_no_jobs(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    fake_slurm.queue(fake, fake_slurm.line("12"))
    fake_slurm.program("squeue", f'[ -z "$SQUEUE_PARTITION" ] && /bin/cat {fake}/queue', fake)
    assert [one.id for one in jobs.queue(os.environ)] == ["12"]


def test_status_imports_no_torch() -> None:
    code = "import sys, pflmpi.cluster.status, pflmpi.commands.status; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- a real Slurm -------------------------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.slow
def test_jobs_of_a_real_slurm(slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_an_array_of_a_real_slurm(slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path, rounds=2)
    array = submit(tmp_path, "A/x/seed$SLURM_ARRAY_TASK_ID", "--array=1-3%1")
    record(tmp_path, array, cells="".join(f"A/x/seed{task}\n" for task in range(4)))
    try:
        testbed.wait_until(f"{array}_1", "COMPLETED", timeout=PATIENCE)
        lines = blocks(capsys, [str(tmp_path)])[array].splitlines()
    finally:
        subprocess.run(["scancel", array], check=True, timeout=30)
    assert lines[0].startswith(f"job {array}, an array: ") and "1 COMPLETED" in lines[0]
    assert lines[2].startswith(f"  {array}_1  COMPLETED  A/x/seed1  round 2 of 2, accuracy ")
    assert [line.split()[0] for line in lines[3:]] == [f"{array}_2", f"{array}_3", f"{array}_0"]
    assert f"{array}_3  PENDING (JobArrayTaskLimit)  A/x/seed3  not begun" in lines[4]
    assert lines[5].endswith("no longer in the queue  A/x/seed0  not begun")


def configure(folder: Path, rounds: int) -> None:
    """Write a configuration that is quick to start."""
    raw = quick_run.settings(training={"rounds": rounds}, runtime={"executor": "loop"})
    (folder / "config.yaml").write_text(dump(raw))


def submit(folder: Path, run: str, *options: str, ranks: int = 2, rounds: int | None = None) -> str:
    """Submit a run below the folder, and return the job's id."""
    words = [f"{folder}/config.yaml --out {folder}/{run} --ranks {ranks} --quiet"]
    words += [f"-s training.rounds={rounds}"] if rounds else []
    command = " ".join(["srun", sys.executable, "-m", "pflmpi", "run", *words])
    array = any(option.startswith("--array") for option in options)
    output = f"--output={folder}/%A_%a.log" if array else f"--output={folder / run}.log"
    wrap = f"--wrap={command}"
    job = testbed.sbatch(f"--chdir={folder}", f"--ntasks={ranks}", output, *options, wrap, env=processes.ENVIRONMENT)
    if not array:
        record(folder / run, job)
    return job


def blocks(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, str]:
    """What `pflmpi status` says of each job, by its id."""
    assert main(["status", *arguments]) == 0
    parts = re.split(r"^job ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return {part.split()[0].strip(","): f"job {part}" for part in parts}

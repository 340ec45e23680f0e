"""`pflmpi status`: recorded answers of Slurm, folders of runs, and a real Slurm."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
import testbed
from pflmpi.cli import main
from pflmpi.cluster import jobs, queue
from pflmpi.cluster.jobs import Job
from pflmpi.cluster.run_status import RunStatus, run_status
from pflmpi.cluster.status_text import headline, progress_lines, progress_summary
from pflmpi.config.yaml_file import dump
from pflmpi.store.metrics import metrics_file

PATIENCE = 200.0  # seconds that a job may need to start and to run its first rounds
HEAD = """JobId={id} {array}JobName=night JobState=PENDING run
   UserId=me(1000) GroupId=us(1000) MCS_label=N/A
   Priority=4294901757 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}:0
   RunTime={ran} TimeLimit={limit} TimeMin=N/A
   SubmitTime=2030-01-02T14:53:04 EligibleTime=Unknown
   StartTime=Unknown EndTime=Unknown Deadline=N/A
   Partition=main AllocNode:Sid=login:3959
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
   NumNodes={count} NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=1 MinMemoryCPU=500M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   Command=/home/me/job.sh Comment=not this
   WorkDir=/home/me
   Comment={comment}
   StdErr={log}
   StdIn=/dev/null
   StdOut={log}
   Power=
   

"""  # noqa: W293  as scontrol 22.05 prints it


def described(comment: str = "pflmpi:/runs/a", **changes: object) -> str:
    """What scontrol prints of a running job, with changes."""
    values = {
        "id": 12,
        "array": "",
        "state": "RUNNING",
        "reason": "None",
        "restarts": 0,
        "code": 0,
        "ran": "00:10:00",
        "limit": "01:00:00",
        "nodes": "node[1-2]",
        "count": 2,
        "comment": comment,
        "log": "/home/me/my logs/12.log",
    }
    return HEAD.format(**{**values, **changes})


def job(**changes: object) -> Job:
    (one,) = jobs.parse_jobs(described("pflmpi:/runs/a", **changes))
    return one


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


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def says(folder: Path, listed: str, *jobs: str) -> None:
    """Make a Slurm whose squeue lists this and whose scontrol describes these jobs, whatever is asked for."""
    (folder / "listed").write_text(listed)
    (folder / "described").write_text("".join(jobs))
    put(folder, "squeue", f"/bin/cat {folder}/listed")
    put(folder, "scontrol", f"/bin/cat {folder}/described")


# --- what Slurm says ----------------------------------------------------------------------------------------------


def test_a_job_is_read_as_scontrol_prints_it() -> None:
    assert job(restarts=2, nodes="node[1-2]") == Job(
        id="12",
        array="",
        task=None,
        state="RUNNING",
        reason="",
        comment="pflmpi:/runs/a",
        nodes="2",
        node_list="node[1-2]",
        restarts=2,
        exit_code=0,
        seconds=600.0,
        limit=3600.0,
        start="",
        log=Path("/home/me/my logs/12.log"),
    )


def test_an_array_is_read_task_by_task_and_what_waits_comes_last() -> None:
    texts = [
        described("pflmpi:/sweep", id=3, array="ArrayJobId=3 ArrayTaskId=2,4-5%2 ", state="PENDING", count="1-1"),
        described("pflmpi:/sweep", id=6, array="ArrayJobId=3 ArrayTaskId=10 "),
        described("pflmpi:/sweep", id=5, array="ArrayJobId=3 ArrayTaskId=1 ", state="FAILED", code=3),
    ]
    found = jobs.parse_jobs("".join(texts))
    assert [one.id for one in found] == ["3_1", "3_10", "3_[2,4-5%2]"]
    assert [one.tasks for one in found] == [[1], [10], [2, 4, 5]]
    assert [one.exit_code for one in found] == [3, 0, 0]
    assert found[2].log is None, "tasks that wait together have no log"


def test_only_jobs_of_ours_are_listed_by_their_number() -> None:
    lines = [
        "CLUSTER: far",
        "100\x1fnight\x1fpflmpi:/runs/my run",
        "99\x1fpflmpi-train\x1f(null)",
        "98\x1fnight\x1f(null)",
        "100\x1fnight\x1fpflmpi:/runs/my run",
    ]
    assert queue.parse_list("\n".join(lines)) == {"99": None, "100": Path("/runs/my run")}
    assert list(queue.parse_list("\n".join(lines))) == ["99", "100"]


def test_a_comment_leads_back_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert jobs.folder_of(jobs.comment_of(Path("runs/a b"))) == tmp_path / "runs/a b"
    assert jobs.folder_of("pflmpi:relative") is None


@pytest.mark.parametrize("text", ["UNLIMITED", "Partition_Limit", "INVALID", ""])
def test_an_unlimited_time_is_none(text: str) -> None:
    assert jobs.duration(text) is None


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
    raw = {"algorithm": {"name": "fedavg"}, "data": {"name": "digits"}, "training": {"rounds": rounds}}
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    metrics_file.restart(folder, 0)
    for round in range(1, done + 1):
        line = dict.fromkeys(metrics_file.COLUMNS, "0") | {"round": str(round), "accuracy_mean": f"0.{round}"}
        metrics_file.append(folder, list((line | {"seconds": "50.0" if round == slow else "2.0"}).values()))


# --- in words -----------------------------------------------------------------------------------------------------


def test_a_job_that_waits_says_why_and_for_what() -> None:
    line = headline(job(state="PENDING", reason="Dependency", nodes="(null)", restarts=1))
    assert line == "job 12 PENDING (Dependency), asks for 2 nodes, 1 restart"


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "FAILED", "CANCELLED", "OUT_OF_MEMORY", "PREEMPTED"])
def test_a_job_that_ended_too_early_says_how_to_continue(state: str) -> None:
    ended = job(state=state, reason=state, code=1)
    assert headline(ended) == f"job 12 {state} with exit code 1 on 2 nodes (node[1-2]), 0 restarts"
    assert "submit the same again" in list(progress_lines(far(), ended))[-1]


def test_a_run_that_was_stopped_says_so() -> None:
    assert list(progress_lines(far(), job(state="FAILED", code=75)))[-1].startswith("stopped after a complete round")


def test_a_run_that_will_not_fit_says_by_how_much_and_what_to_do() -> None:
    short = job(ran="00:10:00", limit="00:12:00")  # 120 s left, 18 rounds of 10 s to go
    text = "\n".join(progress_lines(far(), short))
    assert "10.00 s per round, the last one ended 0:00:03 ago, 0:03:00 to the end, 0:02:00 left of 0:12:00" in text
    assert "IT WILL NOT FIT: 0:01:00 too little, about 12 of the 18 rounds left" in text
    assert "--requeue" in text and "--time" in text
    assert "IT WILL NOT FIT" in progress_summary(far(), short)


@pytest.mark.parametrize(
    "fitting",
    [
        job(ran="00:10:00", limit="00:13:00"),
        job(limit="UNLIMITED"),
        job(state="PENDING", ran="00:00:00", limit="03:00"),
    ],
)
def test_a_run_that_fits_is_not_warned_of(fitting: Job) -> None:
    assert "FIT" not in "\n".join([*progress_lines(far(), fitting), progress_summary(far(), fitting)])


def test_a_finished_run_has_no_advice() -> None:
    lines = list(progress_lines(far(round=30, checkpoint=30), job(state="COMPLETED")))
    assert lines[0].startswith("round 30 of 30") and len(lines) == 2 and "to the end" not in lines[1]


# --- the command --------------------------------------------------------------------------------------------------


def test_a_run_is_shown_where_there_is_no_slurm(run: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "fedgmh on digits" in out and "round 3 of 3, 1 rank, " in out and "job" not in out


def test_a_run_finds_its_job(run: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says(fake, f"12\x1fx\x1f{jobs.comment_of(run)}\n13\x1fx\x1fpflmpi:/else\n", described(jobs.comment_of(run)))
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job 12 RUNNING on 2 nodes (node[1-2]), 0 restarts\n")
    assert f"{run}: fedgmh on digits" in out and "log: /home/me/my logs/12.log" in out


def test_a_run_whose_job_is_forgotten_is_shown_and_says_so(
    run: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(fake, "")
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert "round 3 of 3" in out and "Slurm forgets a job" in out


def test_a_run_below_the_folder_of_an_array_names_the_job_that_may_run_it(
    run: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An array of slurm/array.sbatch: which cell a task runs is not recorded."""
    comment = jobs.comment_of(run.parent)
    task = described(comment, id=13, array="ArrayJobId=12 ArrayTaskId=3 ")
    says(fake, f"12\x1fx\x1f{comment}\n", task)
    (run.parent / "other").mkdir()
    assert main(["status", str(run)]) == 0
    assert f"job 12_3 is RUNNING and works in {run.parent}, perhaps on this run" in capsys.readouterr().out


def test_of_the_jobs_of_a_run_only_what_counts_is_shown(
    run: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comment = jobs.comment_of(run)
    texts = [described(comment, id=11, state="TIMEOUT"), described(comment, id=12, state="PENDING")]
    says(fake, f"11\x1fx\x1f{comment}\n", *texts)
    assert main(["status"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("job")] == ["12"]


def test_an_ended_job_with_nothing_to_show_is_left_out(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {"comment": "(null)", "log": "(null)"}
    texts = [described(id=1, state="FAILED", **unknown), described(id=2, **unknown)]
    texts.append(described(id=3, state="FAILED", comment="(null)"))
    says(fake, "1\x1fpflmpi\x1f(null)\n", *texts)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("job")] == ["2", "3"]
    assert "log: /home/me/my logs/12.log" in out and "its run is unknown" in out


def test_an_array_has_a_line_for_each_cell(
    run: Path, tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "A/x").mkdir(parents=True)
    (sweep / "A/x/seed0").symlink_to(run)
    jobs.cells_file(sweep, "3").write_text("A/x/seed0\nB/x/seed0\nC/x/seed0\nD/x/seed0\nE/x/seed0\n")
    comment, array = jobs.comment_of(sweep), "ArrayJobId=3 ArrayTaskId={} "
    says(
        fake,
        f"3\x1fx\x1f{comment}\n",
        described(comment, id=3, array=array.format("2-3%2"), state="PENDING", reason="JobArrayTaskLimit"),
        described(comment, id=4, array=array.format(0), state="COMPLETED"),
        described(comment, id=5, array=array.format(1), state="FAILED", reason="NonZeroExitCode"),
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
    says(fake, "")
    assert main(["status", what]) == 2
    error = capfd.readouterr()
    assert error.out == "" and error.err.count("\n") == 1 and "is not the folder of a run" in error.err


@pytest.mark.parametrize(
    "answer", ["echo 'slurm_load_jobs error: Invalid job id specified' >&2", "echo 'Job 77_3 not found'"]
)
def test_a_job_that_slurm_does_not_know_is_refused(answer: str, fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put(fake, "scontrol", f"{answer}; exit 1")
    assert main(["status", "77_3"]) == 2
    error = capfd.readouterr()
    assert error.out == "" and "Slurm knows no job 77_3" in error.err


def test_a_forgotten_job_is_known_by_its_log(
    run: Path, tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/night").symlink_to(run)
    (tmp_path / "runs/night.77.log").touch()
    (tmp_path / "sweeps/table/A/x").mkdir(parents=True)
    (tmp_path / "sweeps/table/A/x/seed0").symlink_to(run)
    (tmp_path / "sweeps/table.78_3.log").touch()
    says(fake, "")
    put(fake, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    for job, folder in (("77", "runs/night"), ("78", "sweeps/table"), ("78_3", "sweeps/table")):
        assert main(["status", job]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Slurm knows no job {job} any more; by its log it was for {folder}\n")
        assert "round 3 of 3" in out
    assert main(["status", "7"]) == 2


def test_missing_slurm_is_reported(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 2
    assert "there is no Slurm here" in capfd.readouterr().err


def test_a_slurm_that_is_down_is_reported(fake: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put(fake, "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["status"]) == 3
    assert "Unable to contact slurm controller" in capfd.readouterr().err


def test_a_hanging_slurm_is_not_waited_for(
    run: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "TIME_LIMIT", 0.5)
    put(fake, "squeue", "/bin/sleep 299 & wait")  # as in a site's wrapper: the one that hangs is not our child
    assert main(["status"]) == 3
    assert "did not answer" in capfd.readouterr().err
    assert main(["status", str(run)]) == 0
    out = capfd.readouterr().out
    assert "round 3 of 3" in out and "did not answer" in out and "name the folder" not in out


def test_filters_in_the_environment_hide_no_jobs(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    put(fake, "squeue", '[ -z "$SQUEUE_PARTITION" ] && printf "12\\037x\\037pflmpi:/runs/a\\n"')
    (fake / "described").write_text(described("pflmpi:/runs/a"))
    put(fake, "scontrol", f"/bin/cat {fake}/described")
    assert [one.id for one in queue.mine(os.environ)] == ["12"]


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
    array = submit(tmp_path, "A/x/seed$SLURM_ARRAY_TASK_ID", "--array=1-3%1", comment=tmp_path)
    jobs.cells_file(tmp_path, array).write_text("".join(f"A/x/seed{task}\n" for task in range(4)))
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


def submit(
    folder: Path, run: str, *options: str, ranks: int = 2, rounds: int | None = None, comment: Path | None = None
) -> str:
    """Submit a run below the folder, and return the job's id."""
    words = [f"{folder}/config.yaml --out {folder}/{run} --ranks {ranks} --quiet"]
    words += [f"-s training.rounds={rounds}"] if rounds else []
    command = " ".join(["srun", sys.executable, "-m", "pflmpi", "run", *words])
    return testbed.sbatch(
        f"--ntasks={ranks}",
        f"--comment={jobs.comment_of(comment or folder / run)}",
        f"--output={folder / run}.log" if comment is None else f"--output={folder}/%A_%a.log",
        *options,
        f"--wrap={command}",
        env=processes.ENVIRONMENT,
    )


def blocks(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, str]:
    """What `pflmpi status` says of each job, by its id."""
    assert main(["status", *arguments]) == 0
    parts = re.split(r"^job ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return {part.split()[0].strip(","): f"job {part}" for part in parts}

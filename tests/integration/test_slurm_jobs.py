"""Jobs on a real Slurm: the files in slurm/, and `submit` from the script to the result."""

import contextlib
import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import fake_slurm
import pflmpi
import processes
import quick_run
import table_file
import testbed
from pflmpi.cluster.batch_script import parse_time
from pflmpi.cluster.run_status import read_run_status
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.errors import RunError
from pflmpi.store import job_file, run_folder, verify
from pflmpi.sweep.table import list_cells, load
from project import ROOT, documented

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]

ENVIRONMENT = {
    **processes.ENVIRONMENT,
    "PATH": f"{processes.BIN}{os.pathsep}{os.environ['PATH']}",
    "VIRTUAL_ENV": str(processes.BIN.parent),
}
MANY = 100_000  # rounds: still going on when a test looks; it writes a smaller number before the last start
PATIENCE = 300.0  # seconds: a job may wait for jobs of others, and a loaded machine takes long to start ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a checkout is, which all nodes see."""
    for name in ("launch", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write(folder: Path, rounds: int = 3) -> str:
    """Write a configuration and return its name."""
    raw = quick_run.settings(training={"rounds": rounds, "epochs": 4, "batch_size": 4})
    (folder / "small.yaml").write_text(yaml.safe_dump(raw))
    return "small.yaml"


def shorten(folder: Path) -> int:
    """Let a run that has stopped end soon after its newest round, also in jobs that wait, and return that round."""
    last = run_folder.rounds(folder / "run")[-1]
    write(folder, last + 2)
    for copy in folder.glob("run.*.yml"):
        raw = yaml_file.read(copy)
        copy.write_text(yaml_file.dump({**raw, "training": {**raw["training"], "rounds": last + 2}}))
    return last


def plain(folder: Path) -> str:
    """The digest of the same run in this process."""
    return quick_run.run(yaml.safe_load((folder / "small.yaml").read_text()), folder / "plain")


def sbatch(folder: Path, *words: str, **variables: str) -> str:
    """Submit a batch script as one does in the folder; return the job's id."""
    return testbed.sbatch(f"--chdir={folder}", "--time=20", *words, env={**ENVIRONMENT, **variables})


def submit(folder: Path, *words: str) -> tuple[str, str]:
    """Submit with `pflmpi submit`; return the job's id and what was printed."""
    done = processes.call([*processes.PFLMPI, "submit", "--time=20", *words], PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^job (\d+)", done.stdout)[0], done.stdout


def completed(job: str, log: Path) -> None:
    """Wait until a job has ended well."""
    state = testbed.wait_until(job, timeout=PATIENCE)
    assert state == "COMPLETED", f"{state}\n{log.read_text()}"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds, with pauses: asking Slurm takes the cores that the jobs need."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} s for {what}"
        time.sleep(0.2)


def reach(run: Path, round: int) -> None:
    """Wait until a run has a checkpoint of this round or a later one."""
    wait_for(lambda: run_folder.rounds(run)[-1:] >= [round], f"round {round} of {run}")


def requeued(job: str, restarts: int) -> None:
    """Wait until a job waits in the queue again, for so many times."""

    def waits() -> bool:
        now = testbed.fields(job)
        assert now["JobState"] not in ("COMPLETED", "FAILED", "TIMEOUT"), now
        return (now["JobState"], now["Restarts"]) == ("PENDING", str(restarts))

    wait_for(waits, f"restart {restarts} of job {job}")


def release(job: str) -> None:
    """Let a requeued job start soon, which Slurm holds back for two minutes.

    Not at once: a node refuses a job that comes back in the second in which it was ended ("credential revoked").
    """
    update(job, "StartTime=now+3")


def update(job: str, setting: str) -> None:
    subprocess.run(["scontrol", "update", f"jobid={job}", setting], check=True, timeout=30)


# --- the files in slurm/ ------------------------------------------------------------------------------------------


def test_train_gives_the_digest_of_a_plain_run(folder):
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=1", "--output=log"]
    job = sbatch(folder, *options, "slurm/train.sbatch", write(folder), "run", "-s", "training.rounds=3")
    completed(job, folder / "log")
    assert quick_run.digest(folder / "run") == plain(folder)
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["recorded"]["ranks"] == 2
    assert job_file.read_restarts(folder / "run") == {job: 0}, "by which status finds it"


@pytest.mark.parametrize("script", ["train", "array"])
def test_a_script_needs_nothing_of_the_environment_in_which_it_is_submitted(script, folder):
    """As sites demand it by --export=NONE: what the script sets reaches the ranks all the same."""
    (folder / "slurm").unlink()
    (folder / "slurm").mkdir()
    text = (ROOT / "slurm" / f"{script}.sbatch").read_text()
    place = "# What the job needs besides goes here"
    assert place in text
    own = (
        f"export PATH={ENVIRONMENT['PATH']} VIRTUAL_ENV={ENVIRONMENT['VIRTUAL_ENV']} OMPI_ALLOW_RUN_AS_ROOT=1\n{place}"
    )
    (folder / "slurm" / f"{script}.sbatch").write_text(text.replace(place, own))
    words = [write(folder), "run"]
    if script == "array":
        table_file.write(folder, seeds=[0], columns={"few": {}}, rows={"a": {"algorithm": {"name": "local"}}})
        words = ["small.yaml", "--out", "cells"]
    options = [
        "--export=NONE",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--output=log",
        *["--array=0"] * (script == "array"),
    ]
    job = sbatch(folder, *options, f"slurm/{script}.sbatch", *words)
    completed(job, folder / "log")


def test_a_job_that_its_time_limit_strikes_stops_before_it_and_requeues_itself(folder):
    options = ["--nodes=1", "--ntasks-per-node=2", "--signal=USR1@40", "--output=log"]
    job = sbatch(folder, *options, "slurm/requeue.sbatch", write(folder, MANY), "run")
    try:
        reach(folder / "run", 2)
        hours, minutes, _ = map(int, testbed.fields(job)["RunTime"].split(":"))
        update(job, f"TimeLimit={60 * hours + minutes + 1}")  # so that it strikes now, however long the start took
        requeued(job, 1)
        (stopped,) = re.findall(r"SIGUSR1 came: stopped after round (\d+)", (folder / "log").read_text())
        assert verify.find_newest_good(folder / "run") == (int(stopped), [])
        shutil.copytree(folder / "run", folder / "stopped")
        release(job)
        reach(folder / "run", int(stopped) + 1)
    finally:
        subprocess.run(["scancel", job], check=True, timeout=30)
    testbed.wait_until(job, timeout=PATIENCE)
    last, _ = verify.find_newest_good(folder / "run")
    assert quick_run.digest(folder / "run") == quick_run.resume(folder / "stopped", (f"training.rounds={last}",))


def test_an_array_runs_the_cells_that_are_not_done(folder):
    rows = {name: {"algorithm": {"name": name}} for name in ("fedavg", "local", "fedper")}
    failing = {"row": "local", "column": "many", "set": {"data": {"name": "mnist", "root": "nowhere"}}}
    columns = {"few": {"training": {"lr": 0.1}}, "many": {"training": {"lr": 0.2}}}
    path = table_file.write(folder, seeds=[0], rows=rows, columns=columns, exceptions=[failing])
    first, *_, done, _ = list_cells(load(path), [], None)
    quick_run.run(done.raw, done.run(folder / "cells"))
    options = ["--array=0-5%3", "--ntasks-per-node=1", "--output=log.%a"]
    job = sbatch(folder, *options, "slurm/array.sbatch", "small.yaml", "--out", "cells", MPI="pmix")
    ends = [testbed.wait_until(f"{job}_{task}", timeout=PATIENCE) for task in range(6)]
    assert ends == ["COMPLETED"] * 3 + ["FAILED"] + ["COMPLETED"] * 2
    assert testbed.fields(f"{job}_3")["ExitCode"] == "1:0"
    assert "failed: dataset 'mnist' was not found" in (folder / "log.3").read_text()
    assert (folder / "log.4").read_text() == "cell 4: fedper/few/seed0: 2 of 2 rounds done\n"
    assert quick_run.digest(first.run(folder / "cells")) == quick_run.run(first.raw, folder / "plain")
    # What is submitted now is the one cell that is left.
    last, shown = submit(folder, "--array", "small.yaml", "--out", "cells", "--ntasks=1", "--mpi=pmix")
    assert "1 of 6 cells" in shown
    assert testbed.wait_until(f"{last}_3", timeout=PATIENCE) == "FAILED"

    def status() -> str:
        return processes.call([*processes.PFLMPI, "status", "cells"], PATIENCE, cwd=folder).stdout

    why = "ended with: dataset 'mnist' was not found"
    assert f"job {last}_3 FAILED (NonZeroExitCode)" in (shown := status()) and why in shown
    with testbed.forgetful():
        wait_for(lambda: "Slurm forgets a job" in status(), "Slurm to forget the jobs")
        assert f"  local/many/seed0  not begun; {why}" in status()
    # So it is when the table is corrected; a cell that was done before that, and is another one now, has not failed.
    (folder / "small.yaml").write_text((folder / "small.yaml").read_text().replace("lr: 0.2", "lr: 0.3"))
    words = ["--array", "small.yaml", "--out", "cells", "--ntasks=1", "--failed", "--anew", "-s", "data.name=digits"]
    last, shown = submit(folder, *words, "-s", "data.root=null")
    assert "1 of 6 cells" in shown
    assert testbed.wait_until(f"{last}_3", timeout=PATIENCE) == "COMPLETED"


def test_a_task_with_several_cells_goes_on_after_one_that_fails(folder):
    failing = {"row": "b", "set": {"data": {"name": "mnist", "root": "nowhere"}}}
    rows = {name: {"algorithm": {"name": "local"}} for name in "abc"}
    path = table_file.write(folder, seeds=[0], columns={"few": {}}, rows=rows, exceptions=[failing])
    job, _ = submit(folder, "--array", "small.yaml", "--out", "cells", "--ntasks=1", "--pack=2")
    ends = [testbed.wait_until(f"{job}_{task}", timeout=PATIENCE) for task in (0, 2)]
    assert ends == ["FAILED", "COMPLETED"] and testbed.fields(f"{job}_0")["ExitCode"] == "1:0"
    for cell in list_cells(load(path), [], None):
        expected = None if cell.row == "b" else quick_run.run(cell.raw, folder / cell.row)
        assert (quick_run.digest(cell.run(folder / "cells")) if expected else None) == expected
    shown = processes.call([*processes.PFLMPI, "status", "cells"], PATIENCE, cwd=folder).stdout
    assert f"job {job}, an array: 1 FAILED, 1 COMPLETED" in shown
    assert "b/few/seed0  not begun; ended with: dataset 'mnist' was not found" in shown


# --- submit -------------------------------------------------------------------------------------------------------


def test_what_a_dry_run_shows_is_submitted_and_gives_the_digest_of_a_plain_run(folder):
    command = [write(folder), "--nodes=2", "--ntasks-per-node=1", "--mpi=pmix", "--", "--comment=mine", "--nice=5"]
    shown = processes.call([*processes.PFLMPI, "submit", "--dry-run", "--time=20", *command], PATIENCE, cwd=folder)
    job, printed = submit(folder, *command)
    text = subprocess.run(["scontrol", "write", "batch_script", job, "-"], capture_output=True, text=True, timeout=30)
    assert text.stdout.strip() == shown.stdout.strip()
    log = folder / re.findall(r"^log: (.*)$", printed, re.MULTILINE)[0]
    completed(job, log)
    assert testbed.fields(job)["Comment"] == "mine"
    assert "run: runs/small" in log.read_text()
    assert quick_run.digest(folder / "runs" / "small") == plain(folder)


def test_a_job_that_waits_runs_what_was_submitted(folder):
    job, _ = submit(folder, write(folder), "--out=run", "--ntasks=1", "--", "--hold")
    expected = plain(folder)
    write(folder, MANY)
    subprocess.run(["scontrol", "release", job], check=True, timeout=30)
    completed(job, folder / f"run.{job}.log")
    assert quick_run.digest(folder / "run") == expected


def test_what_a_setup_file_exports_reaches_the_ranks(folder):
    (folder / "setup").write_text("export PFLMPI_DATA=nowhere\n")
    raw = quick_run.settings(data={"name": "mnist"})
    (folder / "small.yaml").write_text(yaml.safe_dump(raw))
    job, _ = submit(folder, "small.yaml", "--out=run", "--ntasks=2", "--setup=setup", "--", "--export=NONE")
    assert testbed.wait_until(job, timeout=PATIENCE) == "FAILED"
    text = (folder / f"run.{job}.log").read_text()
    assert "dataset 'mnist' was not found" in text and "nowhere" in text


def test_a_job_whose_ranks_srun_did_not_start_fails_and_ends_its_chain(folder):
    """Slurm's srun may end with 0 after "task 0 launch failed"; this one always does."""
    fake_slurm.program("srun", "exit 0", folder / "bin")
    (folder / "setup").write_text(f"PATH={folder}/bin:$PATH\n")
    job, _ = submit(folder, write(folder), "--out=run", "--setup=setup")
    after = sbatch(folder, f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--output=log", "--wrap=true")
    assert testbed.wait_until(job, timeout=PATIENCE) == "FAILED"
    assert testbed.fields(job)["ExitCode"] == "3:0"
    assert "srun ended with 0, but rank 0 did not: no rank has started" in (folder / f"run.{job}.log").read_text()
    assert testbed.wait_until(after, timeout=PATIENCE) == "CANCELLED"


def test_submit_in_a_job_takes_nothing_of_it_along(folder):
    command = [*processes.PFLMPI, "submit", write(folder), "--out=run", "--ntasks=1", "--mem=2000", "--time=20"]
    words = ["salloc", "--quiet", "--ntasks=2", "--cpus-per-task=2", "--mem-per-cpu=100", *command]
    done = processes.call(words, PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    (job,) = re.findall(r"^job (\d+)", done.stdout)
    completed(job, folder / f"run.{job}.log")


def test_one_task_starts_as_many_ranks_as_it_has_cores_also_where_it_is_not_bound_to_them(folder):
    job, _ = submit(folder, write(folder), "--out=run", "--ntasks=1", "--cpus-per-task=1")
    completed(job, folder / f"run.{job}.log")
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["recorded"]["ranks"] == 1


def test_the_folder_of_a_log_is_made_from_the_names_that_slurm_puts_in(folder):
    job, printed = submit(folder, write(folder), "--out=run", "--ntasks=1", "--output=logs/%x-%u/%j.out")
    log = folder / re.findall(r"^log: (.*)$", printed, re.MULTILINE)[0]
    completed(job, log)
    assert "run: run" in log.read_text()


def test_a_job_from_python_gives_the_digest_of_a_plain_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    config = Config.load(write(folder))
    job = pflmpi.submit(config, out="run", nodes=2, ntasks=2, time="20", mem="auto")
    assert job.result().round().digest() == plain(folder)
    assert job.state == "COMPLETED" and "run: run" in job.stdout()
    memory = job_file.read_submissions(folder / "run")[job.id].memory
    assert testbed.fields(job.id)["MinMemoryNode"] == f"{-(-memory >> 20)}M"
    long = pflmpi.submit(config.replace(training={"rounds": MANY}), out="runs/quickstart", ntasks=1)
    reach(long.folder, 1)
    command = documented("docs/clusters.md", "pflmpi cancel")
    assert processes.call([*processes.PFLMPI, *command[1:]], PATIENCE, cwd=folder).returncode == 0
    long.wait()
    assert long.state == "CANCELLED"
    with pytest.raises(RunError, match=rf"job {long.id} ended as CANCELLED before its run was complete"):
        long.result()


def test_a_trial_measures_the_run_that_it_begins_and_its_job_gets_that_time(folder):
    """The trial ends in time; what the partition does not allow is refused."""
    options = ["--out=run", "--ntasks=1", "--cpus-per-task=1", "--time=auto", "--set=runtime.spare=60"]
    command = [*processes.PFLMPI, "submit", write(folder, MANY), *options]
    refused = processes.call(command, PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert refused.returncode == 2 and "give a --time, or --trial" in refused.stderr
    done = processes.call([*command, "--trial=2"], PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    trial, job = re.findall(r"^job (\d+)", done.stdout, re.MULTILINE)
    assert testbed.fields(trial)["ExitCode"] == "75:0" and testbed.fields(trial)["TimeLimit"] == "00:02:00"
    state = read_run_status(folder / "run")
    assert state is not None and state.to_end is not None
    limit = parse_time(testbed.fields(job)["TimeLimit"])
    assert limit == pytest.approx(1.5 * state.to_end + 600, rel=0.3)
    reach(folder / "run", state.round + 1)
    subprocess.run(["scancel", job], check=True, timeout=30)
    testbed.wait_until(job, timeout=PATIENCE)
    subprocess.run(["scontrol", "update", "partitionname=main", "maxtime=15"], check=True, timeout=30)
    try:
        refused = processes.call(command, PATIENCE, env=ENVIRONMENT, cwd=folder)
    finally:
        subprocess.run(["scontrol", "update", "partitionname=main", "maxtime=INFINITE"], check=True, timeout=30)
    assert refused.returncode == 2 and "the default partition allows 0:15:00; take more ranks" in refused.stderr
    shorten(folder)
    job, _ = submit(folder, "small.yaml", *options)
    completed(job, folder / f"run.{job}.log")
    assert quick_run.digest(folder / "run") == plain(folder)


@pytest.mark.parametrize("way", ["run", "array"])
def test_ranks_run_in_the_container_of_a_profile_with_its_options_of_srun(way, folder, monkeypatch):
    """A program stands in for apptainer; the interpreter of the job itself is another one."""
    inside = f'echo "apptainer $2 $3 on $SLURMD_NODENAME" >> {folder}/started; shift 4; exec {processes.BIN}/"$@"'
    fake_slurm.program("apptainer", inside, folder / "bin")
    profile = {
        "partition": "high",
        "setup": "modules.sh",
        "srun": "--distribution=cyclic --label",
        "gres": "gpu",
        "container": {"apptainer": "pflmpi.sif", "options": "--nv --no-home"},
    }
    (folder / "site.yaml").write_text(yaml.safe_dump({"here": profile}))
    (folder / "modules.sh").write_text(f"export PATH={folder}/bin:$PATH")
    monkeypatch.setitem(ENVIRONMENT, "PFLMPI_SITE", str(folder / "site.yaml"))
    options = ["--site=here", "--nodes=2", "--ntasks=2", "--gpus-per-node=1"]
    if way == "run":
        job, _ = submit(folder, write(folder), "--out=run", *options)
        completed(job, folder / f"run.{job}.log")
        assert testbed.fields(job)["Partition"] == "high" and "gpu:1" in testbed.fields(job)["TresPerNode"]
        assert re.search(r"^[01]: ", (folder / f"run.{job}.log").read_text(), re.MULTILINE), "--label"
        assert quick_run.digest(folder / "run") == plain(folder)
    else:
        table = table_file.write(folder, seeds=[0], columns={"few": {}}, rows={"a": {"algorithm": {"name": "fedavg"}}})
        job, _ = submit(folder, "--array", table.name, "--out=cells", *options)
        completed(f"{job}_0", folder / f"cells.{job}_0.log")
        assert run_folder.rounds(folder / "cells/a/few/seed0") == [0, 1, 2]
    started = (folder / "started").read_text().splitlines()
    assert len(started) == 2 and all(line.startswith("apptainer --nv --no-home on node") for line in started)


def requeue(job: str) -> None:
    subprocess.run(["scontrol", "requeue", job], check=True, timeout=30)


def warn(job: str) -> None:
    subprocess.run(["scancel", "--signal=USR1", job], check=True, timeout=30)


def test_three_requeues_in_one_run_lose_nothing(folder):
    job, _ = submit(folder, write(folder, MANY), "--out=run", "--requeue", "--ntasks=2")
    stops: list[Callable[[str], None]] = [warn, requeue, warn]
    for restarts, stop in enumerate(stops, 1):
        done = run_folder.rounds(folder / "run")[-1:] or [0]
        reach(folder / "run", done[0] + 2)
        stop(job)
        requeued(job, restarts)
        if restarts == len(stops):
            shorten(folder)
        release(job)
    log = folder / f"run.{job}.log"
    completed(job, log)
    assert log.read_text().count("SIGUSR1 came: stopped after round") == 2
    assert testbed.fields(job)["Restarts"] == "3"
    assert quick_run.digest(folder / "run") == plain(folder)


def test_a_signal_during_start_up_requeues_the_job(folder):
    job, _ = submit(folder, write(folder, MANY), "--out=run", "--requeue", "--ntasks=2")
    try:
        testbed.wait_until(job, "RUNNING", timeout=PATIENCE)
        for _ in range(20):  # before the ranks exist, while Python starts, and while it imports
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # scancel repeats what a step that ends does not answer
                subprocess.run(["scancel", "--signal=USR1", job], timeout=1)
            time.sleep(0.1)
        requeued(job, 1)
        assert not (folder / "run" / "metrics.csv").exists(), "the run has not begun"
    finally:
        subprocess.run(["scancel", job], check=True, timeout=30)


def test_torchrun_in_a_job_sees_all_gpus_of_each_node(folder):
    """With --gpus-per-task=1 in the job, the step with one task per node would get one."""
    sees = 'echo "$SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES"'
    fake_slurm.program("torchrun", f'{sees}; echo 0 > "$PFLMPI_EXIT_FILE"', folder / "bin")
    script = f"PATH={folder}/bin:$PATH launch/torchrun --nproc-per-node=2 -m pflmpi run a.yaml"
    options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1", "--output=log"]
    completed(sbatch(folder, *options, f"--wrap={script}"), folder / "log")
    seen = re.findall(r"(node\d) sees (\S*)", (folder / "log").read_text())
    assert len({node for node, _ in seen}) == 2 and [gpus for _, gpus in seen] == ["0,1", "0,1"]


def test_a_cancelled_job_submitted_again_goes_on(folder):
    command = [write(folder, MANY), "--out=run", "--ntasks=2"]
    job, _ = submit(folder, *command)
    reach(folder / "run", 2)
    second = processes.call([*processes.PFLMPI, "submit", *command], PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert second.returncode == 2 and f"job {job} is RUNNING and works in run already" in second.stderr
    subprocess.run(["scancel", job], check=True, timeout=30)
    testbed.wait_until(job, timeout=PATIENCE)
    before = shorten(folder)
    job, _ = submit(folder, *command)
    completed(job, folder / f"run.{job}.log")
    assert f"round {before}/" not in (folder / f"run.{job}.log").read_text()
    assert quick_run.digest(folder / "run") == plain(folder)


@pytest.mark.parametrize("way", ["submit", "launch/srun"])
@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_start_again_in_their_job_after_one_was_killed(victim, way, folder):
    config, place = write(folder, MANY), ["--nodes=2", "--ntasks-per-node=1"]
    if way == "submit":
        job, _ = submit(folder, config, "--out=run", "--restarts=1", *place)
        log = folder / f"run.{job}.log"
    else:
        command = f"launch/srun --restarts 1 --mpi=none pflmpi run {config} --out run"
        job, log = sbatch(folder, "--output=log", *place, f"--wrap={command}"), folder / "log"
    reach(folder / "run", 2)
    host = testbed.expand(testbed.fields(job)["NodeList"])[victim]
    ranks = [pid for pid in testbed.node_processes(host) if is_rank(pid)]  # of an earlier test's job too, while it ends
    os.kill(next(pid for pid in ranks if Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()), signal.SIGKILL)
    wait_for(lambda: "all start again from the newest checkpoint (1 of 1)" in log.read_text(), "the restart")
    shorten(folder)
    completed(job, log)
    assert testbed.fields(job)["Restarts"] == "0"
    assert quick_run.digest(folder / "run") == plain(folder)


def is_rank(process: int) -> bool:
    """Whether a process of a node is a rank, not a launcher of ranks."""
    try:
        program, *words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except FileNotFoundError:
        return False
    return "python" in program and "pflmpi run" in " ".join(words)


@contextlib.contextmanager
def lost(node: str, how: str) -> Iterator[None]:
    """Kill all processes of a node, or let Slurm take it for lost; bring it back afterwards."""

    def update(*settings: str, check: bool = True) -> None:
        command = ["scontrol", "update", f"nodename={node}", *settings]
        subprocess.run(command, check=check, capture_output=True, timeout=30)

    try:
        if how == "killed":
            for process in testbed.node_processes(node):
                os.kill(process, signal.SIGKILL)
        else:
            update("state=down", "reason=test")
        yield
    finally:
        if how == "killed":
            testbed.rebuild()
        else:
            update("state=resume", check=False)  # its slurmd may have brought it back


def place(job: str, first: bool) -> str:
    """The node that runs the batch script of a job on two nodes, or the other one."""
    batch, nodes = testbed.fields(job)["BatchHost"], testbed.fields(job)["NodeList"]
    return next(node for node in testbed.expand(nodes) if (node == batch) == first)


@pytest.mark.parametrize(("first", "how"), [(False, "killed"), (True, "killed"), (True, "down")])
def test_a_lost_node_loses_nothing(first, how, folder):
    options = ["--requeue", "--restarts=3", "--nodes=2", "--ntasks-per-node=1"]
    job, _ = submit(folder, write(folder, MANY), "--out=run", *options)
    reach(folder / "run", 2)
    with lost(place(job, first), how):
        requeued(job, 1)
        shorten(folder)
        release(job)
        completed(job, folder / f"run.{job}.log")
    assert quick_run.digest(folder / "run") == plain(folder)


def test_the_way_of_a_user_from_python_over_a_dead_node_to_the_report(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, MANY)
    job = pflmpi.submit("small.yaml", out="run", nodes=2, ntasks_per_node=1, time="20", requeue=True, restarts=3)
    reach(job.folder, 2)
    with lost(place(job.id, first=True), "killed"):
        requeued(job.id, 1)
        shorten(folder)
        release(job.id)
        job.wait()  # and no `result`, which is of all the rounds that were submitted
        assert job.state == "COMPLETED" and quick_run.digest(job.folder) == plain(folder)
        shown = processes.call([*processes.PFLMPI, "status", "run"], PATIENCE).stdout
    first, second = re.findall(r"torch \S+, (\S+); 2 ranks on (.*); Slurm job (.*)", job.stdout())
    assert (first[0], first[2]) == (sys.executable, f"{job.id}, restart 0") and second[2] == f"{job.id}, restart 1"
    usage = job_file.compute_usage(job.folder)
    assert usage is not None and usage.starts == 2 and f"; job {job.id} (1 restart) on" in usage.text
    assert "whose end is unknown" not in usage.text
    assert f"used in 2 starts: {usage}" in shown and f"used: {usage}" in job.stdout()
    done = processes.call([*processes.PFLMPI, "report", "run", "--out", "page"], PATIENCE)
    assert done.returncode == 0 and f"used {usage}" in (folder / "page" / "report.html").read_text()


def test_a_job_that_is_not_requeued_ends_with_its_node_and_status_says_how_to_go_on(folder):
    options = ["--out=run", "--restarts=3", "--nodes=2", "--ntasks-per-node=1", "--", "--no-requeue"]
    job, _ = submit(folder, write(folder, MANY), *options)
    reach(folder / "run", 2)
    with lost(place(job, first=True), "down"):
        assert testbed.wait_until(job, timeout=PATIENCE) == "NODE_FAIL"
    done = processes.call([*processes.PFLMPI, "status", "run"], PATIENCE, env=ENVIRONMENT, cwd=folder)
    assert f"job {job} NODE_FAIL" in done.stdout and "submit the same again, and it continues" in done.stdout
    shorten(folder)
    job, _ = submit(folder, "small.yaml", *options)
    completed(job, folder / f"run.{job}.log")
    assert quick_run.digest(folder / "run") == plain(folder)


def test_mpi_that_does_not_fit_srun_is_refused_with_the_flag(folder):
    if shutil.which(str(processes.BIN / "mpirun")) is None:
        pytest.skip("needs the Slurm test bed and Open MPI")
    job, _ = submit(folder, write(folder), "--out=run", "--ntasks=2", "--mpi=pmi2")
    assert testbed.wait_until(job, timeout=PATIENCE) == "FAILED"
    text = (folder / f"run.{job}.log").read_text()
    assert "has started 2 ranks, but MPI sees 1" in text and "srun --mpi=pmix (Open MPI)" in text
    assert [path.name for path in (folder / "run").iterdir()] == ["jobs.txt"]


# --- scale --------------------------------------------------------------------------------------------------------


def test_scale_measures_points_in_jobs_of_their_own_and_then_in_one_allocation(folder):
    def call(*words: str) -> str:
        done = processes.call([*processes.PFLMPI, *words], PATIENCE, env=ENVIRONMENT, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lines() -> list[dict[str, str]]:
        with open(folder / "s" / "scale.csv", newline="") as file:
            return list(csv.DictReader(file))

    words = ["scale", write(folder), "--ranks", "1,2", "--rounds", "3", "--out", "s", "--repeats"]
    submission = [*words, "1", "--submit", "--time=20", "--ntasks-per-node=1"]
    jobs = dict(re.findall(r"^ranks (\d): job (\d+), log", call(*submission), re.MULTILINE))
    assert list(jobs) == ["1", "2"]
    for ranks, job in jobs.items():
        assert job_file.read_restarts(folder / "s" / f"ranks-000{ranks}") == {job: 0}, "by which status finds it"
        completed(job, folder / "s" / f"ranks-000{ranks}.{job}.log")
    assert re.findall(r"^ranks .*", call(*submission), re.MULTILINE) == ["ranks 1: measured", "ranks 2: measured"]
    call("report", "s")
    assert [(line["ranks"], line["nodes"]) for line in lines()] == [("1", "1"), ("2", "2")]
    assert {line["digest"] for line in lines()} == {plain(folder)}

    command = shlex.join([*processes.PFLMPI, *words, "2"])
    completed(sbatch(folder, "--nodes=2", "--ntasks-per-node=1", "--output=log", f"--wrap={command}"), folder / "log")
    assert [(line["nodes"], line["same_bits"]) for line in lines()] == [("1", "1")] * 2 + [("2", "1")] * 2
    assert "[4/4] 2 ranks, repeat 2: 3 rounds" in (folder / "log").read_text(), "two were measured before"

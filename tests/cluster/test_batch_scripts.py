"""Batch scripts: the text that `submit` writes, and the files in slurm/.

After a wanted change of the text:  python tests/cluster/test_batch_scripts.py
"""

import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

import fake_slurm
from pflmpi.cluster.batch_script import LAUNCH, BatchScript, count_ranks, format_script, format_tasks, resolve_options
from pflmpi.errors import ConfigError
from project import GOLDEN, ROOT

BATCH = sorted((ROOT / "slurm").glob("*.sbatch"))
OTHERS = [ROOT / "slurm" / "train.pbs", ROOT / "slurm" / "train.lsf"]

PLACE = {"chdir": "/home/me/first study", "open-mode": "append"}
RUN = ("run", "configs/a.yaml", "-s", "training.rounds=20", "--out", "runs/a", "--continue")
SWEEP = ("sweep", "tables/b.yaml", "--out", "sweeps/b", "--only", "FedGMH/*")
SCALE = ("scale", "configs/a.yaml", "--ranks", "1,4", "--out", "scaling/c", "--only", "4", "--mpi", "pmix")
JOBS = {
    "torch": BatchScript({"job-name": "a", **PLACE, "output": "runs/a.%j.log", "ntasks": "4"}, "/env/bin/python", RUN),
    "pmix": BatchScript(
        {"job-name": "a", **PLACE, "output": "runs/a.%j.log", "nodes": "2"},
        "/env/bin/python",
        RUN,
        mpi="pmix",
        others=["--exclusive", "--comment=night shift", "--gpus-per-task", "1"],
    ),
    "requeue": BatchScript(
        {"job-name": "a", **PLACE, "output": "runs/a.%j.log", "requeue": None, "signal": "USR1@120", "time": "1:00:00"},
        "/env/bin/python",
        RUN,
        mpi="pmi2",
        requeue=True,
    ),
    "restarts": BatchScript({"nodes": "2"}, "/env/bin/python", RUN, restarts=3),
    "setup": BatchScript({"job-name": "a"}, "/env/bin/python", RUN, setup="/home/me/first study/modules.sh"),
    "container": BatchScript(
        {"job-name": "a", "ntasks": "4", "gres": "gpu:a100:4"},
        "/env/bin/python",
        RUN,
        srun=["--cpu-bind=cores", "apptainer", "exec", "--nv", "--bind=/my scratch", "/images/pflmpi.sif"],
        rank_python="python",
        remark="options of --site=gpu: '/home/me/site.yaml'",
    ),
    "once": BatchScript({"job-name": "c-4", "ntasks": "4"}, "/env/bin/python", SCALE, mpi="pmix", once=True),
    "array": BatchScript(
        {"job-name": "b", **PLACE, "output": "sweeps/b.%A_%a.log", "array": format_tasks([0, 1, 2, 4, 7, 8], 3)},
        "/env/bin/python",
        SWEEP,
        array=True,
        requeue=True,
    ),
    "pack": BatchScript(
        {"job-name": "b", "array": format_tasks([0, 7], None)},
        "/env/bin/python",
        SWEEP,
        array=True,
        packs=[[0, 1, 2, 4], [7, 8]],
    ),
}


def golden(name):
    return GOLDEN / f"{name}.sbatch"


def text(name):
    """The script of a job, with the wrappers in a folder that is the same everywhere."""
    return format_script(JOBS[name]).replace(str(LAUNCH), "/env/launch")


# --- what submit writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_script_matches_the_golden_file(name):
    assert text(name) == golden(name).read_text()


@pytest.mark.parametrize("name", JOBS)
def test_sbatch_sees_every_option_before_the_first_command(name):
    lines = format_script(JOBS[name]).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) == len(JOBS[name].options) + bool(JOBS[name].others) and max(options) < first


def test_a_line_that_sbatch_would_misread_is_refused():
    for value in ("a\n#SBATCH --exclusive", "C:\\a"):
        for options, others in (({"job-name": value}, []), ({}, ["-J", value])):
            with pytest.raises(ConfigError, match="cannot read a line break or a backslash"):
                format_script(BatchScript(options, "python", RUN, others=others))


def test_arguments_survive_the_shell():
    odd = ("run", "it's.yaml", "-s", "model={name: mlp}", "--out", "a b/$HOME")
    text = format_script(BatchScript({}, "/bin/echo", odd)).replace(f"bash {LAUNCH}/srun --mpi=none", "printf '%s\\n'")
    shown = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[4:] == list(odd)


@pytest.mark.parametrize(
    ("options", "others", "expected"),
    [
        ({"ntasks": "4"}, [], ""),
        ({"ntasks": "4", "nodes": "2"}, [], ""),
        ({"nodes": "2"}, ["-n8"], ""),
        ({"ntasks-per-node": "4"}, [], "4 ranks, 4 on each node"),
        ({"nodes": "2-3"}, [], "ranks, 1 on each node"),
        (
            {},
            [],
            "a rank for each core (1 without --cpus-per-task, or those of a whole node), which 1 task starts",
        ),
        ({"nodes": "1", "cpus-per-task": "3"}, [], "3 ranks, which 1 task of 3 cores starts"),
        ({"gpus-per-node": "4"}, [], "a rank for each of 4 GPUs (on CPU: for each core), which 1 task starts"),
    ],
)
def test_a_job_without_a_number_of_tasks_says_how_many_ranks_it_has(options, others, expected):
    assert count_ranks(resolve_options(options, others), 1)[1] == expected


@pytest.mark.parametrize(
    ("options", "threads", "expected"),
    [
        ({"ntasks": "4", "nodes": "2"}, 1, 4),
        ({"ntasks": "1", "cpus-per-task": "9"}, 2, 4),
        ({"ntasks-per-node": "4", "nodes": "2"}, 1, 8),
        ({"ntasks": "1", "gpus-per-node": "a100:4", "cpus-per-task": "9"}, 1, 4),
        ({"nodes": "2-3"}, 1, None),
        ({}, 1, None),
    ],
)
def test_the_number_of_ranks_is_that_of_the_tasks_or_what_one_task_starts(options, threads, expected):
    assert count_ranks(options, threads)[0] == expected


# --- files for bash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [*BATCH, *OTHERS, *(ROOT / "launch").iterdir(), *(golden(name) for name in JOBS)],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_bash_can_read_it(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def start(tmp_path):
    """Start a job's script with programs that stand in for Slurm's; returns the exit code and what is printed."""

    def program(name, text):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def start(job, srun, **variables):
        program("srun", srun)
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
        command = ["bash", "-c", format_script(job)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
        return done.returncode, done.stdout + done.stderr

    (tmp_path / "bin").mkdir()
    program("scontrol", 'echo "scontrol $*"')
    return start


@pytest.mark.parametrize("name", ["torch", "requeue"])
def test_a_job_whose_ranks_were_never_started_fails(name, start):
    """As with "task 0 launch failed", after which srun ends with 0."""
    code, printed = start(JOBS[name], "exit 0")
    assert code == 3 and "srun ended with 0, but rank 0 did not: no rank has started" in printed
    assert start(JOBS[name], 'echo 0 > "$PFLMPI_EXIT_FILE"')[0] == 0


def test_the_ranks_of_a_container_have_the_interpreter_inside(start, tmp_path):
    programs = {
        "srun": 'while [ "${1#-}" != "$1" ]; do echo "srun $1"; shift; done; "$@"',
        "apptainer": f'echo "apptainer $1 $2 $3 $4"; shift 4; PATH={tmp_path}/image:$PATH; "$@"',
    }
    fake_slurm.program("apptainer", programs["apptainer"], tmp_path / "bin")
    fake_slurm.program("python", 'echo "inside: $*"; echo 0 > "$PFLMPI_EXIT_FILE"', tmp_path / "image")
    code, printed = start(JOBS["container"], programs["srun"])
    assert code == 0, printed
    assert printed.splitlines() == [
        "srun --mpi=none",
        "srun --cpu-bind=cores",
        "apptainer exec --nv --bind=/my scratch /images/pflmpi.sif",
        f"inside: -P -m pflmpi {' '.join(RUN)}",
    ]


def test_the_cells_of_an_array_too_have_the_interpreter_inside_their_container():
    shown = format_script(replace(JOBS["array"], srun=JOBS["container"].srun, rank_python="python"))
    (words,) = [shlex.split(line) for line in shown.splitlines() if "SLURM_ARRAY_TASK_ID" in line and "/env" in line]
    assert words[0] == "/env/bin/python" and words[-2:] == ["--python", "python"]
    assert words[words.index("--launcher") + 1].endswith(" exec --nv '--bind=/my scratch' /images/pflmpi.sif")


@pytest.mark.parametrize(("code", "printed"), [(75, "scontrol requeue 7_3\n"), (3, ""), (0, "")])
def test_a_task_of_an_array_alone_is_requeued_where_its_sweep_was_stopped(code, printed, start, tmp_path):
    """Also where its ranks have left 75: a sweep that gives a cell up ends with 3. The last task has the array's id."""
    (tmp_path / "python").write_text(
        f'#!/bin/bash\n[ -z "${{PFLMPI_EXIT_FILE:-}}" ] || echo 75 > "$PFLMPI_EXIT_FILE"; exit {code}'
    )
    (tmp_path / "python").chmod(0o755)
    job = replace(JOBS["array"], python=str(tmp_path / "python"))
    assert start(job, "", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3") == (code, printed)


def test_five_starts_without_a_checkpoint_are_the_last(start, tmp_path):
    """The folder of the run is a link, as to a larger disk."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "disk")

    def stopped(round="", restarts=1):
        srun = '[ -z "$ROUND" ] || touch "runs/a/$ROUND"; echo 75 > "$PFLMPI_EXIT_FILE"; exit 1'
        code, printed = start(JOBS["requeue"], srun, ROUND=round, SLURM_RESTART_COUNT=str(restarts))
        assert code == 75
        return printed

    assert [stopped() for _ in range(4)] == ["scontrol requeue 7\n"] * 4
    assert stopped("round_00003.h5") == "scontrol requeue 7\n"
    assert [stopped() for _ in range(4)] == ["scontrol requeue 7\n"] * 4
    assert stopped(restarts=0) == "scontrol requeue 7\n", "another job, after one that was cancelled"
    assert [stopped() for _ in range(3)] == ["scontrol requeue 7\n"] * 3
    assert "five starts in a row were stopped before a round was complete; not started again" in stopped()
    assert not list(tmp_path.glob(".pflmpi-*"))


def test_a_script_of_one_run_starts_its_ranks_again_when_one_is_lost():
    starts = [
        line for path in (ROOT / "slurm").iterdir() for line in path.read_text().splitlines() if "pflmpi run" in line
    ]
    assert len(starts) == 4 and all("--restarts 3 " in line for line in starts)


def test_the_batch_scripts_are_the_three():
    assert [path.stem for path in BATCH] == ["array", "requeue", "train"]


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_batch_script_says_how_it_is_used_and_what_to_edit(path, tmp_path):
    head = path.read_text().splitlines()[1:8]
    assert any(f"#   sbatch {'--array=0-5 ' * (path.stem == 'array')}slurm/{path.name} " in line for line in head)
    assert any(line.startswith("# Edit here") for line in head)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch ")


@pytest.mark.parametrize("path", [*BATCH, *OTHERS], ids=lambda path: path.name)
def test_a_batch_script_says_in_a_line_that_it_was_started_in_another_folder(path, tmp_path):
    environment = {**os.environ, "CONFIG": "a.yaml", "OUT": "runs/a", "SLURM_ARRAY_TASK_ID": "0"}
    command = ["bash", str(path), "a.yaml", "runs/a"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"there is no launch/ in {tmp_path}; submit from the folder that contains it" in done.stderr


if __name__ == "__main__":
    for name in JOBS:
        golden(name).write_text(text(name))
        sys.stdout.write(f"{golden(name)}\n")

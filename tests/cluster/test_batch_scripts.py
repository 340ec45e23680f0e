"""Batch scripts: the text that `submit` writes, and the files in slurm/.

After a wanted change of the text:  python tests/cluster/test_batch_scripts.py
"""

import os
import subprocess
import sys

import pytest

from pflmpi.cluster.batch_script import ENDED_WITH, REQUEUE, BatchScript, script, tasks
from pflmpi.errors import ConfigError
from project import GOLDEN, ROOT

BATCH = sorted((ROOT / "slurm").glob("*.sbatch"))

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
    "restarts": BatchScript({"nodes": "2"}, "/env/bin/python", RUN, requeue=True, restarts=3),
    "setup": BatchScript({"job-name": "a"}, "/env/bin/python", RUN, setup="/home/me/first study/modules.sh"),
    "once": BatchScript({"job-name": "c-4", "ntasks": "4"}, "/env/bin/python", SCALE, mpi="pmix", once=True),
    "array": BatchScript(
        {"job-name": "b", **PLACE, "output": "sweeps/b.%A_%a.log", "array": tasks([0, 1, 2, 4, 7, 8], 3)},
        "/env/bin/python",
        SWEEP,
        array=True,
    ),
}


def golden(name):
    return GOLDEN / f"{name}.sbatch"


# --- what submit writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_the_script_matches_the_golden_file(name):
    assert script(JOBS[name]) == golden(name).read_text()


@pytest.mark.parametrize("name", JOBS)
def test_sbatch_sees_every_option_before_the_first_command(name):
    lines = script(JOBS[name]).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) == len(JOBS[name].options) + bool(JOBS[name].others) and max(options) < first


def test_the_launch_wrappers_requeue_as_the_script_does():
    settings = (ROOT / "launch" / "settings").read_text()
    assert ENDED_WITH in settings and REQUEUE in settings


def test_a_line_that_sbatch_would_misread_is_refused():
    for value in ("a\n#SBATCH --exclusive", "C:\\a"):
        for options, others in (({"job-name": value}, []), ({}, ["-J", value])):
            with pytest.raises(ConfigError, match="cannot read a line break or a backslash"):
                script(BatchScript(options, "python", RUN, others=others))


def test_arguments_survive_the_shell():
    odd = ("run", "it's.yaml", "-s", "model={name: mlp}", "--out", "a b/$HOME")
    text = script(BatchScript({}, "/bin/echo", odd)).replace("srun --mpi=none --kill-on-bad-exit=1", "printf '%s\\n'")
    shown = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[4:] == list(odd)


# --- files for bash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [*BATCH, ROOT / "slurm" / "train.pbs", *(ROOT / "launch").iterdir(), *(golden(name) for name in JOBS)],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_bash_can_read_it(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_five_starts_without_a_checkpoint_are_the_last(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, code in (("srun", '[ -z "$ROUND" ] || touch "runs/a/$ROUND"; exit 75'), ("scontrol", "echo requeued")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}

    def start(round=""):
        command = ["bash", "-c", script(JOBS["requeue"])]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**environment, "ROUND": round}, timeout=60
        )
        assert done.returncode == 75
        return done.stdout + done.stderr

    assert [start() for _ in range(4)] == ["requeued\n"] * 4
    assert start("round_00003.h5") == "requeued\n"
    assert [start() for _ in range(4)] == ["requeued\n"] * 4
    assert "five starts in a row were stopped before a round was complete; not requeued" in start()
    assert not list(tmp_path.glob(".pflmpi-*"))


def test_a_script_of_one_run_starts_its_ranks_again_when_one_is_lost():
    starts = [
        line for path in (ROOT / "slurm").iterdir() for line in path.read_text().splitlines() if "pflmpi run" in line
    ]
    assert len(starts) == 3 and all("--restarts 3 " in line for line in starts)


def test_the_batch_scripts_are_the_three():
    assert [path.stem for path in BATCH] == ["array", "requeue", "train"]


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_batch_script_says_how_it_is_used_and_what_to_edit(path, tmp_path):
    head = path.read_text().splitlines()[1:8]
    assert any(f"#   sbatch {'--array=0-5 ' * (path.stem == 'array')}slurm/{path.name} " in line for line in head)
    assert any(line.startswith("# Edit here") for line in head)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch ")


if __name__ == "__main__":
    for name, job in JOBS.items():
        golden(name).write_text(script(job))
        sys.stdout.write(f"{golden(name)}\n")

"""Programs that stand in for Slurm's, and what its squeue prints."""

import re
from pathlib import Path

import yaml

import quick_run
from pflmpi.cluster import jobs


def enter(folder, monkeypatch, sbatch):
    """Enter a folder with the configuration small.yaml, an empty queue, and an sbatch with this text."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    (folder / "small.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    program("sbatch", sbatch)
    program("squeue", ":")
    return folder


def program(name, text, folder=Path("bin")):
    """Write a program of Slurm's into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def line(id="12", **changes):
    """What squeue prints of a running job, with changes."""
    values = {
        "JobArrayID": id,
        "JobID": re.split("_", id)[0],
        "State": "RUNNING",
        "Reason": "None",
        "NumNodes": 2,
        "NodeList": "node[1-2]",
        "RestartCnt": 0,
        "exit_code": 0,
        "TimeUsed": "10:00",
        "TimeLimit": "1:00:00",
        "StartTime": "N/A",
        "tres-alloc": "cpu=4,mem=300M,node=2,gres/gpu=2",
        "Name": "small",
        "WorkDir": "/home/me",
        "STDOUT": "/home/me/my logs/12.log",
    }
    assert changes.keys() <= values.keys()
    return "".join(f"{value!s:{jobs._QUEUE[name]}}" for name, value in (values | changes).items()) + "\n"


def queue(folder, *lines):
    """Make a squeue in the folder that prints these lines, and an sacct that answers nothing."""
    (folder / "queue").write_text("".join(lines))
    program("squeue", f"/bin/cat {folder}/queue", folder)
    program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1", folder)

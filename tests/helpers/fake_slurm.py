"""A Slurm whose queue is empty: programs that stand in for its own."""

from pathlib import Path

import pytest
import yaml

import quick_run

QUEUED = """JobId=7 JobName=a
   JobState=PENDING Reason=Priority Dependency=(null)
   Comment=pflmpi:{out}
"""


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> Path:
    """Enter a folder with the configuration small.yaml, an empty queue, and an sbatch with this text."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    (folder / "small.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    program("sbatch", sbatch)
    program("squeue", ":")
    return folder


def program(name: str, text: str) -> None:
    """Write a program of Slurm's into the folder that was entered."""
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)

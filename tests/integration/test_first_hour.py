"""docs/first-hour.md: its files and commands, in order, in a folder with nothing else."""

import os
import re
import shlex
import shutil

import pytest

import processes
from pflmpi.analysis.run import open_run
from project import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steps():
    """The name and content of each file that the page tells to save, and "" with the commands between them."""
    blocks, end = [], 0
    for block in BLOCK.finditer(PAGE):
        names = re.findall(r"[Ss]ave (?:this|it) as\s+`([^`]+)`", PAGE[end : block.start()])
        assert (block[1] == "bash") == (not names), block[0]
        blocks.append((names[-1] if names else "", block[2]))
        end = block.end()
    return blocks


def test_the_page_tells_a_whole_story():
    commands = [line for name, text in steps() if not name for line in text.splitlines()]
    assert sum(line.startswith("pflmpi run hour.yaml") for line in commands) == 4
    assert {name for name, _ in steps() if name} >= {"net.py", "slow_body.py", "hour.yaml", "open_client.py"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_command_works_in_order(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.npz", "__pycache__"))
    environment = {
        **processes.ENVIRONMENT,
        "PATH": f"{processes.BIN}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    outputs = {}
    for name, text in steps():
        if name:
            (tmp_path / name).write_text(text)
            continue
        for command in text.splitlines():
            done = processes.call(shlex.split(command), timeout=120, env=environment, cwd=tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            outputs[command] = done.stdout
    compared = next(text for command, text in outputs.items() if command.startswith("pflmpi compare"))
    assert "SlowBody" in compared and "algorithm.speed" in compared
    mean = {name: open_run(tmp_path / "runs" / name).columns["accuracy_mean"][-1] for name in ("slow", "fedavg")}
    assert mean["slow"] > mean["fedavg"] + 0.1, "as the page says"
    shares = re.findall(r"0\.\d{3}|1\.000", outputs["python open_client.py"])
    assert len(shares) == 2 and shares[0] == shares[1]

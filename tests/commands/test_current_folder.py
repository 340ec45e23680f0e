"""No file in the current folder stands for a module of Python's own in the processes that pflmpi starts."""

import re
import subprocess
import sys

import pytest

import processes
from pflmpi.config import yaml_file
from project import ROOT

SECRETS = 'raise SystemExit("a module of the current folder was imported")\n'
CONFIG = """
data: {name: digits, limit: 200}
partition: {name: iid, clients: 2}
model: {name: "./mine.py:Mine", head: "3"}
algorithm: {name: fedavg}
training: {rounds: 1, epochs: 1}
runtime: {device: cpu}
"""
MINE = """
from torch import nn


class Mine(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
"""


@pytest.fixture
def here(tmp_path):
    for name in ("secrets", "tempfile", "random"):
        (tmp_path / f"{name}.py").write_text(SECRETS)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_every_child_is_started_with_P():
    """`python -m` puts the current folder first on `sys.path`."""
    starts = re.compile(r'(\[(sys\.executable, )?"|\{python\} )-[mc]\b')
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "pflmpi").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if starts.search(line)
    ]
    assert not found


def test_a_sweep_in_a_folder_with_a_file_of_such_a_name(here):
    base = yaml_file.parse(CONFIG, "")
    table = {"title": "One", "source": "none", "seeds": [0], "base": base, "columns": {"x": {}}, "rows": {"A": {}}}
    (here / "table.yaml").write_text(yaml_file.dump(table))
    done = processes.call([str(processes.BIN / "pflmpi"), "sweep", "table.yaml", "--out", "sweep"], cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_ranks_that_are_spawned(here):
    code = "from pflmpi.transports.start.spawn import run_ranks; import sys; "
    code += "words = ['-P', '-m', 'pflmpi', 'run', 'config.yaml', '--out', 'run', '--quiet']; "
    code += "sys.exit(run_ranks(2, words) is not None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=here, env=processes.ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun_by_its_wrapper(here):
    words = ["--nproc-per-node=2", "-m", "pflmpi", "run", "config.yaml", "--out", "run", "--quiet"]
    done = processes.call([str(ROOT / "launch/torchrun"), *words], cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr

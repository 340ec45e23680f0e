"""What a start depends on: limits of the system, files of the current folder, how many ranks there are by default."""

import os
import re
import subprocess
import sys

import pytest
import torch
import yaml

import processes
import quick_run
from pflmpi.commands import launch
from pflmpi.config import yaml_file
from pflmpi.limits import explain_limit
from pflmpi.runtime.config import RuntimeConfig
from project import ROOT

AS_ANOTHER_USER = "setpriv --reuid 12345 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"


def rare(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def limited(limits, folder, ranks=1, prefix=""):
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 1})))
    words = " ".join([*processes.PFLMPI, "run", str(config), "--out", str(folder / "run"), "--ranks", str(ranks)])
    return processes.call(["bash", "-c", f"ulimit {limits} && exec {prefix} {words} --quiet"])


@pytest.mark.parametrize(
    ("limits", "ranks", "told"),
    [
        ("-v 1000000", 1, "`ulimit -v` allows 1000000 kB, of which PyTorch alone takes about 4 GB; raise it"),
        rare("-v 3000000", 2, "`ulimit -v` allows 3000000 kB, of which PyTorch alone takes about 4 GB; raise it"),
        rare("-d 500000", 1, "`ulimit -d` allows 500000 kB"),
        rare("-n 8", 2, "`ulimit -n` allows 8 open files, and 1 rank must be able to open 66; raise it"),
        ("-n 67", 2, "`ulimit -n` allows 67 open files, and 2 ranks must be able to open 68; raise it"),
        rare("-f 1", 1, "File too large"),
        ("-f 4", 1, "raise the limit of a file's size (`ulimit -f`)"),
    ],
)
def test_a_limit_of_the_system_is_named(limits, ranks, told, tmp_path):
    done = limited(limits, tmp_path, ranks)
    assert done.returncode in (2, 3)
    assert told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("processes_allowed", "ranks"), [(1, 1), rare(2, 1), rare(1, 2), (2, 2), rare(3, 2), rare(4, 2)]
)
def test_too_few_processes_are_one_error(processes_allowed, ranks, tmp_path):
    if subprocess.run([*AS_ANOTHER_USER.split(), "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root, whose processes no limit counts")
    tmp_path.chmod(0o777)
    done = limited("-c 0", tmp_path, ranks, f"{AS_ANOTHER_USER} prlimit --nproc={processes_allowed}")
    assert done.returncode in (2, 3)
    assert f"`ulimit -u` allows {processes_allowed} for all" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


def test_a_soft_limit_of_open_files_is_raised_where_it_may_be(tmp_path):
    assert limited("-S -n 8", tmp_path, 2).returncode == 0


def test_an_error_of_a_library_that_is_out_of_memory_says_so():
    text = "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried"
    assert (explain_limit(RuntimeError(text)) or "").startswith("out of memory")
    assert explain_limit(RuntimeError("another")) is None


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried", "HIP out of memory.", "CUDA error: out of memory"])
def test_an_error_of_a_gpu_that_is_out_of_memory_says_so(text):
    assert (explain_limit(RuntimeError(text)) or "").startswith("out of memory on a GPU; lower runtime.lanes")


def test_figures_that_the_limit_of_addresses_forbids_are_one_error(tmp_path):
    quick_run.run(quick_run.settings(training={"rounds": 1}), tmp_path / "run")
    words = " ".join([*processes.PFLMPI, "report", str(tmp_path / "run"), "--out", str(tmp_path / "page")])
    done = processes.call(["bash", "-c", f"ulimit -v 16000000 && exec {words}"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "`ulimit -v` allows 16000000 kB, and what draws figures reserves 64 GB of addresses" in done.stderr


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
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "pflmpi").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if starts.search(line)
    ]
    assert not places


def test_a_sweep_in_a_folder_with_a_file_of_such_a_name(here):
    base = yaml_file.parse(CONFIG, "")
    table = {"title": "One", "source": "none", "seeds": [0], "base": base, "columns": {"x": {}}, "rows": {"A": {}}}
    (here / "table.yaml").write_text(yaml_file.dump(table))
    done = processes.call([str(processes.BIN / "pflmpi"), "sweep", "table.yaml", "--out", "sweep"], cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_ranks_that_are_no_forks(here):
    """Of a process that has asked the driver of a GPU for anything."""
    code = "from pflmpi.commands.launch import start_ranks; import sys; "
    code += "sys.exit(start_ranks(2, ['run', 'config.yaml', '--out', 'run', '--quiet'], None))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=here, env=processes.ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun_by_its_wrapper(here):
    words = ["--nproc-per-node=2", "-m", "pflmpi", "run", "config.yaml", "--out", "run", "--quiet"]
    done = processes.call([str(ROOT / "launch/torchrun"), *words], cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("visible", "gpus", "jobs", "expected"),
    [
        (4, None, 1, 4),
        (4, 2, 1, 2),
        (4, 8, 1, 4),
        (4, None, 2, 2),
        (4, 1, 2, 1),  # jobs share the GPUs, and each takes no more than it may
        (4, 3, 2, 2),
        (1, None, 4, 1),
        (0, None, 1, 6),
        (0, 2, 4, 1),
        (0, None, 9, 1),
    ],
)
def test_ranks_are_as_many_as_gpus_or_else_cores(visible, gpus, jobs, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(launch, "num_cores", lambda _: 6)
    assert launch.default_ranks(RuntimeConfig(gpus=gpus), jobs) == expected
    assert launch.default_ranks(RuntimeConfig(gpus=gpus, device="cpu"), jobs) == max(1, 6 // jobs)
    assert launch.default_ranks(RuntimeConfig(device="cpu", threads=2), jobs) == max(1, 3 // jobs)


def test_the_count_of_restarts_is_for_the_ranks_alone(monkeypatch):
    counts = []
    monkeypatch.setattr(launch, "_start_once", lambda *_: counts.append(os.environ["PFLMPI_RESTARTED"]))
    assert launch.start_ranks(2, [], None, 1) == 0
    assert counts == ["0"] and "PFLMPI_RESTARTED" not in os.environ

"""Scripts of launch/ and benchmarks/ work, and a run imports no more than it needs."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

import processes
import table_file
from project import ROOT

PROGRAMS = {
    "srun": 'while [ "$1" != sh ]; do shift; done; "$@"',  # one node
    "sbcast": 'cp "${@: -2}"',
}
WITHOUT_PYTHON = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LD_LIBRARY"))}


def write_programs(folder, **programs):
    """Write programs that stand in for others; returns PATH with their folder first."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return f"{folder}/bin:{os.environ['PATH']}"


@pytest.mark.slow
def test_a_packed_environment_works_from_the_disks_of_the_nodes_until_the_job_ends(tmp_path):
    made = processes.call([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")])
    assert made.returncode == 0, made.stderr
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "__editable__.pflmpi.pth").write_text(f"{ROOT}\n")
    variables = {"VIRTUAL_ENV": f"{tmp_path}/env", "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    command = [str(ROOT / "launch" / "pack"), "an env.tar"]
    packed = processes.call(command, env={**WITHOUT_PYTHON, **variables}, cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    (tmp_path / "env").rename(tmp_path / "gone")

    where = 'python -c "import sys; print(sys.prefix)"'
    show = f'"$python" -c "import pflmpi; print(pflmpi.__file__)"; {where}'
    show += '; "$python" -m pflmpi examples here > /dev/null; "$python" -c "print(*open(\'/proc/self/maps\'))"'
    done = source_setup(tmp_path, "an env.setup", show)
    copy = tmp_path / "pflmpi-7"
    package = copy / site.relative_to(tmp_path / "env") / "pflmpi" / "__init__.py"
    printed = done.stdout.replace("dist-packages", "site-packages")  # as Debian's Python calls it
    assert printed.splitlines()[:2] == [str(package), str(copy)], done.stderr
    assert {Path(path).parent for path in re.findall(r"\S*/libpython\S*", printed)} <= {copy / "lib"}
    assert (tmp_path / "here" / "configs" / "quickstart.yaml").is_file(), "what pflmpi includes is packed too"
    assert not copy.exists(), "nothing is left on the nodes"


def source_setup(folder, setup, command, local=None, **variables):
    """Source a setup that launch/pack has written as job 7 on one node, and run a command after it."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PFLMPI_LOCAL": str(local or folder)}
    variables = {**WITHOUT_PYTHON, "PATH": write_programs(folder, **PROGRAMS), **job, **variables}
    variables.pop("VIRTUAL_ENV", None)
    return processes.call(["bash", "-c", f". './{setup}' && {command}"], env=variables, cwd=folder)


@pytest.fixture
def setup(tmp_path):
    """The setup of an environment that holds a file bin/tool; Python, which would copy the true one, makes it."""
    python = 'mkdir "$2/bin" "$2/libpython"; touch "$2/bin/tool"'
    variables = {**WITHOUT_PYTHON, "VIRTUAL_ENV": "/env", "PATH": write_programs(tmp_path, python=python)}
    packed = processes.call(["bash", "-c", f"umask 077; {ROOT}/launch/pack env.tar"], env=variables, cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    return "env.setup"


def test_a_packed_environment_is_for_all_users_and_its_libpython_comes_first(setup, tmp_path):
    with tarfile.open(tmp_path / "env.tar") as packed:
        assert {item.name: oct(item.mode) for item in packed if item.isdir()} == dict.fromkeys(
            (".", "./bin", "./libpython"), "0o755"
        )
    show = 'echo "$LD_LIBRARY_PATH"'
    libpython = f"{tmp_path}/pflmpi-7/libpython"
    assert source_setup(tmp_path, setup, show).stdout == f"{libpython}\n"
    assert source_setup(tmp_path, setup, show, LD_LIBRARY_PATH="/a b").stdout == f"{libpython}:/a b\n"


def test_an_environment_is_unpacked_in_a_folder_with_a_space_and_nothing_else_is_deleted(setup, tmp_path):
    local = tmp_path / "of a job"
    for folder in (local, tmp_path / "of"):
        folder.mkdir()
    done = source_setup(tmp_path, setup, 'ls "$VIRTUAL_ENV/bin"', local)
    assert (done.returncode, done.stdout) == (0, "tool\n"), done.stderr
    assert (tmp_path / "of").exists() and list(local.iterdir()) == []


def test_a_folder_that_a_packed_environment_has_not_made_is_refused_and_stays(setup, tmp_path):
    mine = tmp_path / "pflmpi-7" / "mine"
    mine.mkdir(parents=True)
    done = source_setup(tmp_path, setup, "echo begins")
    assert (done.returncode, done.stdout) == (2, "") and mine.exists()
    assert f"cannot make a new folder {mine.parent} on each node; PFLMPI_LOCAL names" in done.stderr
    again = source_setup(tmp_path, setup, "echo begins", SLURM_RESTART_COUNT="1")
    assert again.stdout == "begins\n" and not mine.exists(), "what a killed start of the same job has left"


def test_what_is_packed_is_named(tmp_path):
    for words in (["env.zip"], ["a.tar", "b.tar"], []):
        assert processes.call([str(ROOT / "launch" / "pack"), *words], cwd=tmp_path).returncode == 2


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_packed(tmp_path):
    variables = {**os.environ, "VIRTUAL_ENV": "/env", "PATH": write_programs(tmp_path, python="echo packs")}
    done = processes.call([str(ROOT / "launch" / "pack"), "no/folder/env.tar"], cwd=tmp_path, env=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"launch/pack: cannot write {tmp_path}/no/folder/env.tar" in done.stderr


IMPORT_ALL = """
import importlib
from pathlib import Path
for path in sorted([*Path().glob("*.py"), *Path().glob("reliability/*.py")]):
    importlib.import_module(".".join(path.with_suffix("").parts))
"""


@pytest.mark.parametrize("folder", ["benchmarks", "tests/helpers"])
def test_every_benchmark_and_helper_can_be_imported(folder):
    env = {**processes.ENVIRONMENT, "RANK": "0"}
    done = processes.call([sys.executable, "-c", IMPORT_ALL], timeout=100, cwd=ROOT / folder, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_bare_loop_and_pflmpi_do_the_same_work(tmp_path):
    words = ["--folder", str(tmp_path), "--works", "tiny", "tiny-fedgh", "--peers", "bare", "pflmpi", "--passes", "1"]
    done = processes.call([sys.executable, "benchmarks/peers", *words], timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "`fedavg`, 6 clients with 20 samples of 1x28x28, 2 a round, epochs 1, batch 10, `logistic`" in done.stdout
    assert "`fedgh`, 6 clients with 20 samples of 3x32x32, 2 a round, epochs 2, batch 10, `cnn`" in done.stdout
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| bare", "| pflmpi"))]
    assert [len(row) for row in rows] == [5, 5, 5] and all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.slow
def test_the_benchmark_runs_and_its_promises_hold():
    tiny = ["--device", "cpu", "--tiny", "--only", "promises", "cifar10-1000"]
    done = processes.call([sys.executable, "benchmarks/gpu.py", *tiny], timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "same bits on 1, 2 ranks: yes" in done.stdout and "same bits after a continuation: yes" in done.stdout
    assert re.search(r"s a round, floor \S+ s, graphed \S+ s, ratio .* after pfl-research", done.stdout)


@pytest.mark.slow
def test_what_a_captured_step_takes_of_the_host_is_measured():
    done = processes.call([sys.executable, "benchmarks/captured_steps.py", "--repeats", "1"], timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| one client after another \| \d+ .*\n\| 7 clients in lanes \| \d+ ", done.stdout)


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_and_writes_each_figure_as_it_goes(tmp_path):
    steps = [
        "sums",
        "failed_capture",
        "captures",
        "workloads",
        "passes",
        "papers",
        "messages",
    ]  # the promises have a test above
    words = ["launch/gpu-check", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", *steps]
    done = processes.call(words, timeout=600, cwd=ROOT)
    lines = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (lines, (tmp_path / "gpu_check.log").read_text()[-3000:])
    assert [line["step"] for line in lines if "ended" in line] == steps
    assert all(line.get("holds", True) for line in lines) and any("ratio" in line for line in lines)


def test_a_step_of_the_check_that_takes_too_long_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu_check = importlib.import_module("gpu_check")
    monkeypatch.setitem(gpu_check.STEPS, "promises", (1.0, gpu_check.promises))
    options = argparse.Namespace(out=tmp_path, device="cpu", tiny=True)
    assert gpu_check.run_step("promises", time.monotonic() + 60, options) == 1
    assert gpu_check.run_step("promises", time.monotonic() + 0.1, options) == 0
    killed, left_out = map(json.loads, (tmp_path / "gpu_check.jsonl").read_text().splitlines())
    assert killed["ended"] == "killed after 1 s" and left_out == {"step": "promises", "left_out": "0 s are left"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_one_line_says_so():
    done = processes.call(["launch/gpu-check"], timeout=60, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("gpu-check: torch finds no CUDA device here;")
    assert len(done.stderr.splitlines()) == 1


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/helpers")
import quick_run
raw = quick_run.settings(training={"rounds": 1, "epochs": 9}, runtime={"executor": "lanes"})
quick_run.run(raw, Path(sys.argv[1]) / "run")
heavy = {"sklearn", "scipy", "sympy", "torch._dynamo", "torchvision", "altair", "vl_convert", "pandas", "tensorboard"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_a_run_in_lanes_imports_neither_scikit_learn_nor_the_compiler_of_pytorch(tmp_path):
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.slow
def test_cells_of_several_tables_are_run_together_the_cheapest_first(tmp_path):
    for name, hidden in (("a", 400), ("b", 4)):
        (tmp_path / name).mkdir()
        base = {**table_file.TABLE["base"], "model": {"name": "mlp", "hidden": hidden}}
        table_file.write(tmp_path / name, seeds=[0], base=base).rename(tmp_path / f"{name}.yaml")
    words = ["benchmarks/gpu_tables.py", *(str(tmp_path / f"{name}.yaml") for name in "ab"), "--out", tmp_path / "out"]
    command = [sys.executable, *map(str, words), "--device", "cpu", "--jobs", "1", "--seconds", "400"]
    done = processes.call(command, timeout=400, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("8 cells: 8 done, 0 left, 0 failed\n"), done
    ended = sorted((tmp_path / "out").rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.relative_to(tmp_path / "out").parts[0] for path in ended] == ["b"] * 4 + ["a"] * 4
    again = processes.call(command, timeout=400, cwd=ROOT)
    assert again.returncode == 0 and again.stdout.endswith("8 cells: 8 done, 0 left, 0 failed\n"), again

"""Scripts of launch/ and benchmarks/ work, and a run imports no more than it needs."""

import os
import subprocess
import sys

import pytest
import torch

import processes
from project import ROOT

SRUN = 'while [ "$1" != sh ]; do shift; done; "$@"'  # one node


@pytest.mark.slow
def test_a_packed_environment_works_from_the_disks_of_the_nodes_until_the_job_ends(tmp_path):
    made = processes.call([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")])
    assert made.returncode == 0, made.stderr
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "__editable__.pflmpi.pth").write_text(f"{ROOT}\n")
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("sbcast", 'cp "$2" "$3"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"VIRTUAL_ENV": f"{tmp_path}/env", "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    packed = processes.call([str(ROOT / "launch" / "pack"), "an env.tar"], env=variables, cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    (tmp_path / "env").rename(tmp_path / "gone")

    where = 'python -c "import sys; print(sys.prefix)"'
    show = f'"$python" -c "import pflmpi; print(pflmpi.__file__)"; {where}'
    show += '; "$python" -m pflmpi examples here > /dev/null'
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PFLMPI_LOCAL": str(tmp_path)}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **job}
    del variables["VIRTUAL_ENV"]
    done = processes.call(["bash", "-c", f". '{tmp_path}/an env.setup'; {show}"], env=variables, cwd=tmp_path)
    copy = tmp_path / "pflmpi-7"
    package = copy / site.relative_to(tmp_path / "env") / "pflmpi" / "__init__.py"
    assert done.stdout.splitlines() == [str(package), str(copy)], done.stderr
    assert (tmp_path / "here" / "configs" / "quickstart.yaml").is_file(), "what pflmpi includes is packed too"
    assert not copy.exists(), "nothing is left on the nodes"


def test_what_is_packed_is_named(tmp_path):
    for words in (["env.zip"], ["a.tar", "b.tar"], []):
        assert processes.call([str(ROOT / "launch" / "pack"), *words], cwd=tmp_path).returncode == 2


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
    assert "s a round, floor" in done.stdout and "after pfl-research" in done.stdout


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

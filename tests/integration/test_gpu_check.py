"""The one command for whoever has a GPU: what it measures runs on a CPU too, and without a GPU it says so."""

import sys

import pytest
import torch

import processes
from project import ROOT


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

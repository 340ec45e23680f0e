"""The comparison with other simulators runs; the others need environments of their own, and are tried by hand."""

import sys

import pytest

import processes
from project import ROOT


@pytest.mark.slow
def test_the_bare_loop_and_pflmpi_do_the_same_work(tmp_path):
    words = ["--folder", str(tmp_path), "--works", "tiny", "tiny-fedgh", "--peers", "bare", "pflmpi", "--passes", "1"]
    done = processes.call([sys.executable, "benchmarks/peers", *words], timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "`fedavg`, 6 clients with 20 samples of 1x28x28, 2 a round, epochs 1, batch 10, `logistic`" in done.stdout
    assert "`fedgh`, 6 clients with 20 samples of 3x32x32, 2 a round, epochs 2, batch 10, `cnn`" in done.stdout
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith(("| bare", "| pflmpi"))]
    assert [len(row) for row in rows] == [5, 5, 5] and all(float(cell) > 0 for row in rows for cell in row[1:])

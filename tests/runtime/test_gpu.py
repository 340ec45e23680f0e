"""On a GPU: the same bits on one rank and on two that share it, and close to the CPU's results."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import processes
import quick_run
from pflmpi.store import run_folder
from project import HELPERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(raw: dict[str, Any], folder: Path, ranks: int) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [
        *processes.PFLMPI,
        "run",
        str(folder / "config.yaml"),
        "--out",
        str(folder / "run"),
        "--ranks",
        str(ranks),
    ]
    done = processes.call(command, timeout=250)
    assert done.returncode == 0, done.stderr
    return quick_run.digest(folder / "run")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedgmh", "fedproto", "fedamp"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("model", [{"name": "mlp"}, {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 32}], ids=str)
def test_same_bits_on_one_and_two_ranks(algorithm: str, executor: str, model: dict[str, Any], tmp_path: Path) -> None:
    runtime = {"device": "cuda", "executor": executor, "lanes": 3, "server": "shared"}  # both ranks compute
    raw = quick_run.settings(algorithm={"name": algorithm}, model=model, runtime=runtime)
    assert run(raw, tmp_path / "one", 1) == run(raw, tmp_path / "two", 2)


@pytest.mark.parametrize(
    ("model", "executor"), [("mlp", "lanes"), ("mlp", "loop"), ("cnn", "lanes"), ("resnet18", "loop")]
)
def test_captured_steps_have_the_bits_of_plain_ones(model: str, executor: str) -> None:
    command = [sys.executable, str(HELPERS / "captured_on_gpu.py"), model, executor]
    done = processes.call(command, timeout=250)
    assert done.returncode == 0, done.stderr


def test_the_gpu_agrees_with_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 2}, runtime={"device": device})
        run(raw, tmp_path / device, 1)
    servers = [run_folder.read_server(tmp_path / device / "run", 2) for device in ("cpu", "cuda")]
    for path, array in servers[0].items():
        # 1e-4: some twenty float32 steps with sums in another order.
        np.testing.assert_allclose(array, servers[1][path], atol=1e-4, err_msg=path)

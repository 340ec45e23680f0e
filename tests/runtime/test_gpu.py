"""On a GPU: the same bits on one rank and on two that share it, and close to the CPU's results."""

import os
import sys

import numpy as np
import pytest
import torch
import yaml

import processes
import quick_run
from every_algorithm import MESSAGE_KINDS
from pflmpi.store import run_folder
from project import HELPERS, ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(raw, folder, ranks):
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
def test_same_bits_on_one_and_two_ranks(algorithm, executor, model, tmp_path):
    runtime = {"device": "cuda", "executor": executor, "lanes": 3, "server": "shared"}  # both ranks compute
    raw = quick_run.settings(algorithm={"name": algorithm}, model=model, runtime=runtime)
    assert run(raw, tmp_path / "one", 1) == run(raw, tmp_path / "two", 2)


@pytest.mark.parametrize("model", ["mlp", "cnn", "protocnn"])
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_every_algorithm_has_one_result_captured_or_not_and_it_is_close_to_the_hosts(model, executor):
    check(model, executor)


def test_a_model_with_batch_norm_has_one_result_captured_or_not():
    check("resnet18", "loop", *MESSAGE_KINDS)


def check(*words):
    done = processes.call([sys.executable, str(HELPERS / "gpu_conformance.py"), *words], timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_messages_go_from_gpu_to_gpu_by_nccl(tmp_path):
    done = torchrun(3, HELPERS / "transport_worker.py", "nccl", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("server", ["shared", "without a GPU"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedgmh", "fedamp", "fedproto"])
def test_a_run_has_the_same_bits_over_nccl(algorithm, server, tmp_path):
    raw = quick_run.settings(
        algorithm={"name": algorithm},
        model={"name": "mlp", "hidden": 600},  # messages of more than 64 KiB
        runtime={"device": "cuda", "server": "shared" if server == "shared" else "auto"},
    )
    alone = run(raw, tmp_path / "one", 1)
    blind = {} if server == "shared" else {"SERVER_WITHOUT_GPU": "1"}
    out = tmp_path / "three"
    words = ["run", tmp_path / "one" / "config.yaml", "--out", out, "--debug"]
    done = torchrun(3, HELPERS / "nccl_on_one_gpu.py", *words, **blind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "large messages: NCCL" in done.stderr, done.stderr
    assert quick_run.digest(out) == alone


def torchrun(ranks, *words, **more):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")]
    environment = {**processes.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "NCCL_SOCKET_IFNAME": "lo", **more}
    return processes.call([*start, *map(str, words)], timeout=250, env=environment)


def test_the_gpu_agrees_with_the_cpu(tmp_path):
    for device in ("cpu", "cuda"):
        raw = quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 2}, runtime={"device": device})
        run(raw, tmp_path / device, 1)
    servers = [run_folder.read_server(tmp_path / device / "run", 2) for device in ("cpu", "cuda")]
    for path, array in servers[0].items():
        # 1e-4: some twenty float32 steps with sums in another order.
        np.testing.assert_allclose(array, servers[1][path], atol=1e-4, err_msg=path)

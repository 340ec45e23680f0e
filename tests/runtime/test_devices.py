"""What follows from how ranks are spread over nodes: their share of a GPU, their names; the kernels of a rank."""

import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import processes
from pflmpi.errors import ConfigError
from pflmpi.learning.training import TrainingConfig
from pflmpi.machine import Gpu
from pflmpi.runtime import devices
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import place_ranks
from pflmpi.transports.detect import detect
from pflmpi.transports.peers import Peer, describe_ranks
from project import ROOT


def test_the_ranks_on_a_gpu_have_its_share_together(monkeypatch):
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    gpus = tuple(Gpu(f"GPU-{i}", "A100", 100 * devices.CUDA_CONTEXT_BYTES) for i in range(2))
    five = place_ranks([Peer("a", rank, (0,), gpus) for rank in range(5)], RuntimeConfig(server="shared"))
    two = place_ranks([Peer("a", rank, (0,), gpus) for rank in range(2)], RuntimeConfig())
    for rank in range(5):
        devices.limit_memory(five, rank, RuntimeConfig(gpu_memory=0.5))
    assert [share for share, _ in limits] == pytest.approx([0.5 / 3 - 0.01, 0.24, 0.5 / 3 - 0.01, 0.24, 0.5 / 3 - 0.01])
    assert [device.index for _, device in limits] == [0, 1, 0, 1, 0]
    devices.limit_memory(five, 0, RuntimeConfig())
    assert limits[5] == (pytest.approx(1 / 3 - 0.01), torch.device("cuda", 0)), "each has a part, also of all of it"
    devices.limit_memory(two, 0, RuntimeConfig())  # all of it: nothing to say
    devices.limit_memory(place_ranks([Peer("a", 1)], RuntimeConfig()), 0, RuntimeConfig(gpu_memory=0.5))
    assert len(limits) == 6


def test_ranks_whose_contexts_fill_a_gpu_are_refused():
    small = (Gpu("GPU-0", "GTX", 2 * devices.CUDA_CONTEXT_BYTES),)
    two = place_ranks([Peer("a", rank, (0,), small) for rank in range(2)], RuntimeConfig(server="shared"))
    with pytest.raises(ConfigError, match=r"2 ranks share a GPU of 1000 MiB,.* each takes 500 MiB .* fewer ranks"):
        devices.limit_memory(two, 0, RuntimeConfig())


def test_a_restart_is_counted():
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect(torchrun).restarts == 0
    assert detect({**torchrun, "TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2
    assert detect({"PFLMPI_RESTARTED": "2"}).restarts == 2, "by a wrapper in launch/, or by `pflmpi run`"


def test_a_peer_that_has_ended_is_seen_before_it_is_reaped():
    here = Peer.here((0,), (), "")
    assert not here.ended()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    peer = replace(here, process=child.pid)
    assert not peer.ended()
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    assert peer.ended(), "a zombie"
    child.communicate()
    assert peer.ended(), "gone"
    assert not replace(peer, host="elsewhere").ended()


def test_a_rank_in_another_namespace_of_processes_is_not_taken_for_ended():
    """As in a container for each GPU: one host name, and the number of a process means another one, or none, here."""
    code = "from pflmpi.transports.peers import Peer; print(Peer.here((0,), (), '').to_json())"
    command = [*["unshare", "--pid", "--fork", "--mount-proc"], sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=processes.PATIENCE)
    if "unshare failed" in done.stderr:
        pytest.skip("needs root to make a namespace")
    foreign, here = Peer.from_json(done.stdout), Peer.here((0,), (), "")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert foreign.host == here.host
    assert not replace(foreign, process=gone.pid).ended() and replace(here, process=gone.pid).ended()


def test_many_names_are_cut():
    assert describe_ranks(range(20), []).endswith("rank 7 and 12 more")


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus-per-task=1"], {("0", "0"), ("1", "0")}),
        (["--gres=gpu:2", "--gpu-bind=single:1"], {("0", "0"), ("1", "0")}),
        (["--gres=gpu:2"], {("0,1", "0"), ("0,1", "1")}),
    ],
)
def test_under_slurm_each_rank_has_a_gpu_of_its_own(slurm, options, expected):
    code = """
import os
from pflmpi.machine import Gpu
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import place_ranks
from pflmpi.transports import introduce, open_transport
from pflmpi.transports.detect import detect
from pflmpi.transports.peers import Peer
seen = os.environ["CUDA_VISIBLE_DEVICES"]
first = int(os.environ["SLURM_STEP_GPUS"].split(",")[0])  # numbers of the node; CUDA_VISIBLE_DEVICES counts from 0
transport = open_transport("auto", detect(os.environ), 60)
introduce(transport, Peer.here((0,), [Gpu(f"GPU-{first + i}", "A100", 1) for i in map(int, seen.split(","))], ""))
print(seen, place_ranks(transport.peers, RuntimeConfig()).number[transport.rank], flush=True)
transport.close()
"""
    start = ["srun", "--nodes=1", "--ntasks=2", *options, sys.executable, "-c", code]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {tuple(line.split()) for line in done.stdout.splitlines()} == expected


@pytest.fixture
def precisions(monkeypatch):
    """The settings of single precision, as they were before the test."""
    backends = torch.backends
    for place in (backends, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        monkeypatch.setattr(place, "fp32_precision", place.fp32_precision)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield backends
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("place", ["", "cudnn.conv", "cudnn.rnn", "cuda.matmul"])
@pytest.mark.parametrize(("precision", "expected"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_single_precision_is_what_is_configured_whatever_a_users_code_has_set(precision, expected, place, precisions):
    set_by_user = attrgetter(place)(precisions) if place else precisions
    set_by_user.fp32_precision = "ieee" if expected == "tf32" else "tf32"
    devices.fix_kernels(torch.device("cuda", 0), RuntimeConfig(), TrainingConfig(precision=precision))
    backends = (precisions.cudnn.conv, precisions.cudnn.rnn, precisions.cuda.matmul)
    assert [backend.fp32_precision for backend in backends] == [expected] * 3


def test_a_process_that_is_no_rank_takes_the_first_gpu_by_its_number(monkeypatch):
    chosen_devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen_devices.append)  # which needs a number
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    runtime = RuntimeConfig()
    devices.fix_kernels(devices.choose_device(runtime), runtime, TrainingConfig())
    torch.use_deterministic_algorithms(False)
    assert [device.index for device in chosen_devices] == [0]
    assert devices.choose_device(RuntimeConfig(device="cpu")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device(runtime).type == "cpu"

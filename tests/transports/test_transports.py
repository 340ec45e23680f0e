"""One conformance suite for all transports: in process, on threads, and in real processes under each launcher."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import processes
import transport_checks
from pflmpi.errors import TransportError
from pflmpi.transports import torchdist
from pflmpi.transports.detect import Launch
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.transports.peers import Peer, check_alive, describe_ranks
from pflmpi.transports.torchdist import TorchTransport
from pflmpi.transports.waiting import WaitTimeout, describe_timeout, wait
from project import HELPERS, ROOT
from thread_transport import run_ranks
from transport_checks import CHECKS

WORKER = str(HELPERS / "transport_worker.py")
TORCH = pytest.param("torch", marks=pytest.mark.slow)  # importing torch on three ranks takes most of the time


def launch(way, what, folder):
    """Run the worker on 3 ranks; return the exit code, the output and the errors."""
    start = {"mpi": ["mpirun", "-n", "3", sys.executable], "torch": ["torchrun", "--standalone", "--nproc-per-node=3"]}
    program, *arguments = start[way]
    command = [str(processes.BIN / program), *arguments, WORKER, what, str(folder)]
    root = str(ROOT)
    done = processes.call(command, env={**processes.ENVIRONMENT, "PYTHONPATH": root})
    return done.returncode, done.stdout, done.stderr


def wait_until_all_have_ended(folder):
    """Wait for the workers to end, for less than their time limit.

    Each has left a file named by its process; mpirun may end a moment before a rank that it has killed is gone.
    """
    ranks = [Path("/proc") / file.name for file in folder.iterdir() if file.name.isdecimal()]
    assert len(ranks) == 3
    processes.wait_for(lambda: not any(rank.exists() for rank in ranks), "ranks to end")


@pytest.mark.parametrize("name", CHECKS)
def test_in_process(name):
    CHECKS[name](InProcessTransport())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CHECKS)
def test_on_threads(name, ranks):
    run_ranks(ranks, CHECKS[name])


@pytest.mark.parametrize("way", ["mpi", TORCH])
def test_in_processes(way, tmp_path):
    code, out, err = launch(way, "check", tmp_path)
    assert code == 0, err
    expected = {f"rank {rank} of 3 over {way}: {name} holds" for name in CHECKS for rank in range(3)}
    assert set(out.splitlines()) == expected | {f"rank {rank} closed" for rank in range(3)}


@pytest.mark.parametrize("way", ["mpi", TORCH])
@pytest.mark.parametrize(("what", "mpi_code"), [("abort", 3), ("raise", 1), ("kill", 137)])
def test_when_one_rank_ends_all_end(what, mpi_code, way, tmp_path):
    code, out, err = launch(way, what, tmp_path)
    assert code == (mpi_code if way == "mpi" else 1), err  # torchrun has one code for every failure
    wait_until_all_have_ended(tmp_path)
    for line in out.splitlines():  # ranks that noticed by themselves said so in one line
        assert re.search(r": (a rank ended or was lost|rank .*\(host .* ended or was killed) during ", line)
    if what == "kill" and way == "torch":  # mpirun ends the others before they notice, and says which rank it was
        assert len(out.splitlines()) == 2 and "rank 1 (host" in out


@pytest.mark.parametrize("way", ["mpi", TORCH])
def test_a_missing_rank_is_an_error_after_the_time_limit(way, tmp_path):
    code, out, err = launch(way, "late", tmp_path)
    assert code == (3 if way == "mpi" else 1), err
    assert re.search(
        r"(exchange|broadcast) did not end within \d\.\d s: rank 1 \(host \S+, process \d+\) did not come to it", out
    )
    wait_until_all_have_ended(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["connected", "stopped server"])
def test_a_stopped_rank_0_that_hosts_the_store_is_named_after_the_time_limit(moment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "3"}
    ranks = [
        processes.launch(
            [sys.executable, WORKER, moment, str(tmp_path)],
            env={**processes.ENVIRONMENT, **meeting, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks[1:]:
            out, err = rank.communicate(timeout=60)
            assert rank.returncode == 3, err
            assert re.search(
                r"did not end within \d\.\d s: rank 0( \(host \S+, process \d+\))? did not come to it", out
            )
        assert ranks[0].poll() is None, "the stopped rank was still there when the others ended"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_srun_without_mpi_connects_through_slurms_variables(tmp_path):
    port = 20000 + os.getpid() % 10000
    ranks = []
    for rank in range(2):
        step = {
            "SLURM_JOB_ID": str(port - 20000),
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, WORKER, "check", str(tmp_path)]
        ranks.append(processes.launch(command, env={**processes.ENVIRONMENT, **step}))
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=processes.PATIENCE)
        assert process.returncode == 0, err
        assert f"rank {rank} of 2 over torch: large_messages holds" in out


def test_a_failing_rank_stops_the_others_and_its_error_is_raised():
    def work(transport):
        transport.barrier()
        if transport.rank == 2:
            raise KeyError("rank 2 is ill")
        if transport.rank == 1:
            transport.gather(np.zeros(1, np.uint8), [1] * 4)
        transport_checks.check_broadcast(transport)

    with pytest.raises(KeyError, match="rank 2 is ill"):
        run_ranks(4, work)


def test_the_last_collective_call_succeeds_although_a_rank_fails_afterwards():
    def work(transport):
        largest = transport.maximum(np.array([float(transport.rank)]))
        if transport.rank == 1:
            raise KeyError("after the call")
        seen.append(transport.rank)
        return float(largest[0])

    seen: list[int] = []
    with pytest.raises(KeyError, match="after the call"):
        run_ranks(3, work)
    assert sorted(seen) == [0, 2]


def test_ranks_that_make_different_calls_are_a_defect():
    def work(transport):
        if transport.rank == 0:
            transport.barrier()
        else:
            transport.maximum(np.zeros(1))

    with pytest.raises(AssertionError, match="different calls"):
        run_ranks(2, work)


def test_threads_have_a_time_limit():
    over = threading.Event()

    def work(transport):
        if transport.rank == 0:
            assert over.wait(processes.PATIENCE)
        else:
            with pytest.raises(TransportError, match=r"barrier did not end within 0.1 s"):
                transport.barrier()
            over.set()

    run_ranks(2, work, timeout=0.1)


def test_results_come_in_rank_order():
    def work(transport):
        return transport.rank, transport.size

    assert run_ranks(3, work) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    "call",
    [
        lambda transport: transport.broadcast(np.zeros(4, np.float32)),
        lambda transport: transport.broadcast(np.zeros((2, 2), np.uint8)),
        lambda transport: transport.broadcast(np.zeros(8, np.uint8)[::2]),
        lambda transport: transport.gather(np.zeros(4, np.uint8), [5]),
        lambda transport: transport.exchange({0: np.zeros(4, np.uint8)}, {0: 5}, 0),
        lambda transport: transport.exchange({0: np.zeros(4, np.uint8)}, {}, 0),
        lambda transport: transport.exchange({}, {1: 4}, 4),
        lambda transport: transport.exchange({0: np.zeros(0, np.uint8)}, {}, 0),
        lambda transport: transport.maximum(np.zeros(4, np.float32)),
    ],
)
def test_a_call_that_differs_from_its_declaration_is_a_defect(call):
    with pytest.raises(AssertionError):
        call(InProcessTransport())


def test_abort_in_process_ends_with_the_code():
    with pytest.raises(SystemExit) as ended:
        InProcessTransport().abort(3)
    assert ended.value.code == 3


def test_close_twice_is_harmless():
    transport = InProcessTransport()
    transport.close()
    transport.close()


def test_a_wait_asks_until_done_and_stops_at_the_limit():
    answers = iter([False] * 50 + [True])
    wait(lambda: next(answers), 10)
    assert not list(answers)
    with pytest.raises(WaitTimeout) as up:
        wait(lambda: False, 0.05)
    assert up.value.seconds > 0.05


def test_a_time_out_names_the_missing_ranks():
    text = describe_timeout("gather", 600.0, describe_ranks([2], [Peer("a", 1), Peer("a", 2), Peer("b", 3)]))
    assert text.startswith("gather did not end within 600.0 s: rank 2 (host b, process 3) did not come to it; raise ")
    assert "a rank hangs" in describe_timeout("gather", 600.0, "")


def test_a_long_wait_leaves_the_core_to_others():
    began, used = time.monotonic(), time.thread_time()
    wait(lambda: time.monotonic() - began > 0.5, 10)
    assert time.thread_time() - used < 0.1


def test_the_start_of_nccl_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(torchdist, "GpuGroup", lambda *arguments: threading.Event().wait(processes.PATIENCE))
    transport = mock.MagicMock(spec=TorchTransport, rank=0, timeout=0.01, _wait=None, _wait_for_gpu=None)
    with pytest.raises(WaitTimeout):
        TorchTransport.use_gpus(transport, [0, 1], torch.device("cpu"))


def test_the_whole_reason_why_nccl_does_not_start_is_shown_and_how_to_do_without(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("NCCL error in: /NCCLUtils.cpp:93, unhandled cuda error\nLast error:\nCuda failure 'x'")

    monkeypatch.setattr(torchdist, "GpuGroup", fails)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transport = TorchTransport(Launch("torchrun", 0, 1, f"127.0.0.1:{port}"), 30)
    with pytest.raises(TransportError) as caught:
        transport.use_gpus([0], torch.device("cpu"))
    transport.close()
    assert str(caught.value).startswith(
        "NCCL does not start (NCCL error in: /NCCLUtils.cpp:93, unhandled cuda error Last error: Cuda failure 'x')"
    )
    assert "runtime.between_gpus = 'host'" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_starts_on_the_gpu_of_its_rank_in_whatever_thread(rank, monkeypatch):
    """The current GPU is one of a thread, and the first in a new one."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((threading.get_ident(), device)))
    monkeypatch.setattr(
        torch.distributed,
        "new_group",
        lambda ranks, device_id, **more: calls.append((threading.get_ident(), device_id)),
    )
    monkeypatch.setattr(torchdist.GpuGroup, "_on_device", lambda *arguments: None)
    device = torch.device("cuda", 3) if rank else torch.device("cpu")
    transport = mock.MagicMock(spec=TorchTransport, rank=rank, timeout=60.0, _wait=None, _wait_for_gpu=None)
    TorchTransport.use_gpus(transport, [1, 2], device)
    threads, devices = zip(*calls, strict=True)
    assert devices == ((device, device) if rank else (None,))
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()


def test_a_wait_for_a_gpu_ends_when_a_rank_of_this_host_has_ended():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    peers = [Peer(socket.gethostname(), os.getpid()), Peer(socket.gethostname(), ended.pid)]
    check_alive(peers[:1])
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 .* has ended"):
        TorchTransport._wait_for_gpu(mock.Mock(peers=peers, timeout=60.0), mock.Mock(is_completed=lambda: False))
    assert time.monotonic() - began < 30

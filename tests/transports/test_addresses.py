"""Addresses, network interfaces and libraries that cannot be used are one error that names the variable."""

import ctypes
import socket
import time
from typing import Any

import pytest

import thread_transport
from pflmpi.errors import ConfigError, TransportError
from pflmpi.transports.detect import Launch
from pflmpi.transports.torchdist import TorchTransport
from pflmpi.transports.waiting import describe_loss


@pytest.mark.parametrize("port", ["99999", "0", "-1", "abc", ""])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_impossible_port_is_refused_at_once(port, rank, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot meet at 127.0.0.1:{port} .*MASTER_PORT a free port"):
        TorchTransport(Launch("torchrun", rank, 2), 30)
    assert time.monotonic() - began < 5


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot meet at 127.0.0.1:{port} \(.*Address already in use"):
            TorchTransport(Launch("torchrun", 0, 2, f"127.0.0.1:{port}"), 30)


@pytest.mark.parametrize(
    ("rank", "error", "reason"), [(0, ConfigError, "known"), (1, TransportError, "rank 0 did not")]
)
def test_a_host_that_nobody_knows_is_named(rank, error, reason):
    with pytest.raises(error, match=r"at no\.such\.host\.invalid:29872.* MASTER_ADDR") as raised:
        TorchTransport(Launch("torchrun", rank, 2, "no.such.host.invalid:29872"), 2)
    assert reason in str(raised.value)


def test_an_unknown_interface_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TransportError, match=rf"at 127.0.0.1:{port} by .* GLOO_SOCKET_IFNAME \(.*nope0"):
        TorchTransport(Launch("torchrun", 0, 2, f"127.0.0.1:{port}"), 30)


def test_the_whole_reason_of_a_library_is_shown():
    nccl = (
        "NCCL error in: /torch/NCCLUtils.cpp:93, unhandled system error (run with NCCL_DEBUG=INFO for details). "
        + "x" * 200
        + "\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<4000> failed : \x1b[31mNo route to host\x1b[0m\n"
    )
    error = RuntimeError(nccl + "Exception raised from checkForNCCLErrors at x (most recent")
    shown = describe_loss("broadcast", error, "")
    assert shown.startswith("a rank ended or was lost during broadcast (NCCL error in: ")
    assert "Last error: socketStartConnect: Connect to 10.0.0.1<4000> failed : No route to host)" in shown
    assert shown.isprintable() and "most recent" not in shown


def test_texts_of_any_length_reach_rank_0():
    texts = ["ä" * 5000, "", "x"]
    assert thread_transport.run_ranks(3, lambda comm: comm.gather_texts(texts[comm.rank])) == [texts, None, None]


@pytest.mark.parametrize("text", ["ä" * 5000, "", "x"])
def test_rank_0s_text_of_any_length_reaches_all(text):
    texts = [text, "another", ""]
    assert thread_transport.run_ranks(3, lambda comm: comm.broadcast_text(texts[comm.rank])) == [text] * 3


class Library:
    """The C functions of a library that answers 1 or 0, by one function or the other, or has neither."""

    def __init__(self, open_mpi: int | None = None, other: int | None = None) -> None:
        if open_mpi is not None:
            self.MPIX_Query_cuda_support = lambda: open_mpi
        if other is not None:
            self.MPIX_GPU_query_support = lambda kind, answer: self._set(answer, other) if kind == 0 else 1

    def _set(self, answer: Any, value: int) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (Library(open_mpi=1), True),
        (Library(open_mpi=0), False),
        (Library(other=1), True),
        (Library(other=0), False),
        (Library(open_mpi=0, other=1), False),
        (Library(), None),
    ],
    ids=["yes", "no", "yes by the other function", "no by it", "no by the first", "absent"],
)
def test_a_library_is_asked_for_gpu_memory(library, expected):
    from pflmpi.transports.mpi import query_device_buffers  # needs an MPI library

    assert query_device_buffers(library) is expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11", "Open MPI 5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: unreleased", "MPICH 5.0.2"),
    ],
)
def test_a_library_has_a_short_name(text, name):
    from pflmpi.transports.mpi import format_library_name

    assert format_library_name(text) == name

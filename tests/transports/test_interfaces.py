"""An address or a network interface that cannot be used is one error that names the variable."""

import socket
import time

import pytest
import torch

from pflmpi.errors import ConfigError
from pflmpi.transports.detect import Launch
from pflmpi.transports.torch_store import connect
from pflmpi.transports.torchdist import TorchTransport
from pflmpi.transports.waiting import lost


@pytest.mark.parametrize("port", ["99999", "0", "-1", "abc", ""])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_impossible_port_is_refused_at_once(port, rank, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"MASTER_PORT = '{port}' .*expected a port from 1 to 65535"):
        TorchTransport(Launch("torchrun", rank, 2), 30)
    assert time.monotonic() - began < 5


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port} .Address already in use.*another"):
            TorchTransport(Launch("torchrun", 0, 2, f"127.0.0.1:{port}"), 30)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_nobody_knows_is_refused(rank):
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = 'no\.such\.host\.invalid' stands for no machine"):
        connect(Launch("torchrun", rank, 2, "no.such.host.invalid:29872"), 2)


def test_an_unknown_interface_is_refused_with_those_that_there_are(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME = 'nope0', which .* does not have; it has .*lo"):
        TorchTransport(Launch("torchrun", 0, 2, "127.0.0.1:1"), 30)


@pytest.mark.parametrize(("value", "fits"), [("no", False), ("=l", False), ("l", True), ("^no", True), ("=lo", True)])
def test_interfaces_of_nccl_may_be_beginnings_of_names(value, fits, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    transport = object.__new__(TorchTransport)
    with pytest.raises(AttributeError if fits else ConfigError, match="_arrivals" if fits else "NCCL_SOCKET_IFNAME"):
        transport.use_gpus([0], torch.device("cpu"))


def test_the_whole_reason_of_a_library_is_shown():
    nccl = (
        "NCCL error in: /torch/NCCLUtils.cpp:93, unhandled system error (run with NCCL_DEBUG=INFO for details). "
        + "x" * 200
        + "\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<4000> failed : \x1b[31mNo route to host\x1b[0m\n"
    )
    shown = lost("broadcast", RuntimeError(nccl + "Exception raised from checkForNCCLErrors at x (most recent"), "")
    assert "Last error: socketStartConnect: Connect to 10.0.0.1<4000> failed : No route to host)" in shown
    assert shown.isprintable() and "most recent" not in shown

"""torch's key-value store: a hung host is not waited for, and it listens only where ranks connect to."""

import contextlib
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from torch.distributed import HashStore

import processes
import quick_run
from pflmpi.store import run_folder
from pflmpi.transports import torch_store
from pflmpi.transports.detect import Launch
from pflmpi.transports.torch_store import Arrivals, connect, listen
from pflmpi.transports.waiting import WaitTimeout, call_within


class HungStore:
    """A store whose process was stopped: torch's `check` then never returns."""

    def clone(self) -> "HungStore":
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return True


@pytest.mark.parametrize(("hosted", "absent"), [(True, [0]), (False, [])])
def test_the_rank_that_hosts_a_hung_store_is_the_one_that_is_absent(hosted, absent, monkeypatch):
    monkeypatch.setattr(torch_store, "_ANSWER_SECONDS", 0.05)
    arrivals = Arrivals(HungStore(), rank=1, size=3, hosted=hosted)
    arrivals.enter()
    missing = call_within(processes.PATIENCE, arrivals.absent)
    arrivals.close()
    assert missing == absent


@pytest.mark.parametrize(
    ("noted", "absent"),
    [({0: 3, 2: 3}, []), ({0: 3, 2: 2}, [2]), ({0: 2, 2: 1}, [2]), ({0: 2}, [2]), ({0: 4, 2: 3}, []), ({}, [0, 2])],
)
def test_the_rank_that_the_others_wait_for_is_named(noted, absent):
    """Rank 0, which waits for rank 2 in an earlier call, is not."""
    store = HashStore()
    for rank, number in noted.items():
        store.set(f"call/{rank}", str(number))
    arrivals = Arrivals(store, rank=1, size=3, hosted=True)
    for _ in range(3):
        arrivals.enter()
    missing = call_within(processes.PATIENCE, arrivals.absent)
    arrivals.close()
    assert missing == absent


def test_a_call_that_returns_late_is_left_behind():
    with pytest.raises(WaitTimeout):
        call_within(0.01, lambda: threading.Event().wait(1))
    assert call_within(processes.PATIENCE, lambda: 7) == 7
    with pytest.raises(KeyError):
        call_within(processes.PATIENCE, lambda: {}["a"])


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1", "::1"}), ("debian-name", {"::", "0.0.0.0"})],
)
def test_the_store_listens_only_where_ranks_connect_to(host, addresses, monkeypatch):
    resolve = socket.getaddrinfo
    stands_for = {"debian-name": "127.0.1.1"}  # another address for the other nodes, so it cannot be the one
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *more, **options: resolve(stands_for.get(name, name), *more, **options)
    )
    with listen(host, 0) as heard:
        assert heard.getsockname()[0] in addresses


def test_the_store_is_reached_at_the_address_it_listens_at(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = connect(Launch("slurm", 0, 1, address=f"127.0.0.1:{port}"), timeout=30)
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert listening(port) == {"0100007F"}


def listening(port):
    """The addresses, as the kernel writes them, at which something listens on a port."""
    return {address for address, number, _ in listeners() if number == port}


def listeners():
    """Address, port and inode of all sockets that listen."""
    sockets = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] == "0A":
                sockets.append((address, int(number, 16), words[9]))
    return sockets


@pytest.mark.slow
def test_a_run_on_one_machine_cannot_be_reached_from_another(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(training={"rounds": 2, "epochs": 5000})))
    process = processes.launch([*processes.PFLMPI, "run", str(config), "--out", str(tmp_path / "run"), "--ranks", "2"])
    try:
        processes.wait_for(lambda: 0 in run_folder.rounds(tmp_path / "run"), "the first checkpoint")
        addresses = listening_of([process.pid, *processes.descendants(process.pid)])
    finally:
        processes.kill_all(process.pid)
        process.communicate()
    assert addresses and all(is_loopback(address) for address in addresses), addresses


def listening_of(pids):
    """The addresses, as the kernel writes them, at which some processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    return {address for address, _, inode in listeners() if f"socket:[{inode}]" in sockets}


def is_loopback(address):
    return address == "0100007F" or address == "0" * 24 + "01000000" or address.endswith("FFFF00000100007F")

"""Hosts made of network namespaces, for `several_hosts.py`: bring them up, start ranks on them, read their counters.

The folder of tools has `nsup N [RATE]` (hosts h1..hN on a bridge), `delaysw.py N MILLISECONDS` (the same with a delay;
it runs as long as they are there), `nsdown` (removes both) and `nsagent HOST COMMAND` (stands in for ssh). Needs root.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PORT = "29517"
_LIMIT = 400.0  # seconds that a run may take
_HEADERS = 66  # bytes of Ethernet, IP and TCP with its time stamps, of a packet
_TO_IN0 = ["u32", "match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", "in0"]
_SEGMENT = 1448  # bytes that TCP has in a packet of 1500
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",  # no other fabric is looked for
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # the hosts share the cores of one machine
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@dataclass(frozen=True)
class Network:
    """Hosts that are up, and what is between them.

    Attributes:
        tools: the folder of tools.
        count: number of hosts.
        delay: milliseconds one way.
        rate: megabits per second of each host, each way; None without a limit.
    """

    tools: Path
    count: int
    delay: float = 0.0
    rate: float | None = None

    def __str__(self) -> str:
        words = [f"{self.delay:g} ms"] if self.delay else []
        words += [f"{self.rate:g} Mbit/s"] if self.rate else []
        return ", ".join(words) or "no limit"


@dataclass(frozen=True)
class Sent:
    """What hosts have sent each other: bytes, packets, and segments that TCP has sent again (on a busy machine)."""

    bytes: int
    packets: int
    again: int

    def __sub__(self, other: "Sent") -> "Sent":
        return Sent(self.bytes - other.bytes, self.packets - other.packets, self.again - other.again)

    @property
    def payload(self) -> int:
        """The bytes without headers and without what was sent again."""
        return self.bytes - _HEADERS * self.packets - _SEGMENT * self.again


@contextmanager
def up(network: Network) -> Iterator[None]:
    """Bring the hosts up, and remove them and everything that runs on them in the end."""
    there = {line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line}
    if taken := sorted(there & {f"h{host}" for host in range(1, network.count + 1)}):
        raise SystemExit(
            f"the network namespaces {', '.join(taken)} are there already; {network.tools}/nsdown ends them"
        )
    switch = None
    try:
        if network.delay:
            program = ["chrt", "-f", "20", sys.executable, f"{network.tools}/delaysw.py"]
            words = [*program, str(network.count), str(network.delay)]
            switch = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
            assert switch.stdout is not None and switch.stdout.readline() == "ready\n", "delaysw.py did not start"
            for host in range(1, network.count + 1) if network.rate else ():
                _limit(f"h{host}", network.rate)
        else:
            rate = [] if network.rate is None else [f"{network.rate:g}mbit"]
            _call(f"{network.tools}/nsup", str(network.count), *rate)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave half of it
        if switch is not None:
            switch.terminate()
            switch.communicate()
        _call(f"{network.tools}/nsdown")
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run(network: Network, transport: str, ranks: Sequence[int], arguments: Sequence[str]) -> None:
    """Run Python with the arguments on so many ranks of each host, in the order of hosts, to the end.

    Args:
        network: the hosts, up.
        transport: "mpi" or "torch".
        ranks: of each host; hosts without any are left alone.
        arguments: of Python, the same on every rank.
    """
    command = [sys.executable, *arguments]
    environment = {**os.environ, **_ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if transport == "mpi":
        places = ",".join(f"h{host}:{count}" for host, count in enumerate(ranks, 1) if count)
        agent = ["--prtemca", "plm_ssh_agent", f"{network.tools}/nsagent"]
        _finish([_start(1, ["mpirun", *agent, "--host", places, "--bind-to", "none", *command], environment)])
        return
    started: list[subprocess.Popen[str]] = []
    for host, count in enumerate(ranks, 1):
        for local in range(count):
            place = {
                "RANK": str(len(started)),
                "WORLD_SIZE": str(sum(ranks)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "h1",
                "MASTER_PORT": _PORT,
            }
            started.append(_start(host, command, {**environment, **place}))
    _finish(started)


def sent(network: Network) -> Sent:
    """Return what all hosts together have sent so far."""
    size = packets = again = 0
    for host in range(1, network.count + 1):
        text = _call("ip", "netns", "exec", f"h{host}", "cat", "/proc/net/dev", "/proc/net/snmp")
        fields = [line.partition(":") for line in text.splitlines()]
        (link,) = (values.split() for name, _, values in fields if name.strip() == "eth0")
        names, values = (words.split() for name, _, words in fields if name == "Tcp")
        size, packets = size + int(link[8]), packets + int(link[9])
        again += int(dict(zip(names, values, strict=True))["RetransSegs"])
    return Sent(size, packets, again)


def _limit(host: str, rate: float) -> None:
    """Limit what a host sends, and what it receives by way of a second device; a short burst passes at once."""
    limit = ["root", "tbf", "rate", f"{rate:g}mbit", "burst", f"{max(64.0, rate / 2):g}kb", "latency", "50ms"]
    _call("tc", "-n", host, "qdisc", "add", "dev", "eth0", *limit)
    _call("ip", "-n", host, "link", "add", "in0", "type", "ifb")
    _call("ip", "-n", host, "link", "set", "in0", "up")
    _call("tc", "-n", host, "qdisc", "add", "dev", "eth0", "handle", "ffff:", "ingress")
    _call("tc", "-n", host, "filter", "add", "dev", "eth0", "parent", "ffff:", "protocol", "all", *_TO_IN0)
    _call("tc", "-n", host, "qdisc", "add", "dev", "in0", *limit)


def _start(host: int, command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"h{host}", *command]
    return subprocess.Popen(
        ["ip", "netns", "exec", f"h{host}", *named],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Wait for processes; if one fails, say what it has printed. Those left are killed with their host."""
    for process in processes:
        output, _ = process.communicate(timeout=_LIMIT)
        if process.returncode:
            raise SystemExit(f"exit code {process.returncode}:\n{output[-3000:]}")


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

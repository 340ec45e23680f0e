"""Bytes between hosts against the counted ones, and seconds of communication.

    python benchmarks/several_hosts.py --netns DIR [--out FILE]       as root; DIR has the tools that `hosts.py` names

Three hosts are network namespaces of this machine. FedAvg on digits with a wide MLP: 4.2 MB of parameters, so a round
moves 4.2 MB to each other rank, and as much back from each: slices of its model, and the slice that it has folded.

Bytes: what the hosts' interfaces have sent in a run of many rounds less that of a run of few, by the same difference of
what metrics.csv counts. Seconds: `exchange_seconds` of metrics.csv, the median over rounds, at three rates and three
delays. All hosts share the cores of one machine.
"""

import argparse
import importlib.metadata
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import hosts
from hosts import Network

from pflmpi.config.yaml_file import dump
from pflmpi.machine import cores
from pflmpi.store import metrics_file

TRANSPORTS = ("mpi", "torch")
SPREAD = (1, 1, 1)  # ranks of each host
WIDE, NARROW = 14000, 100  # hidden units of the MLP on 8 x 8 pictures
FEW, MANY, TIMED, WARM = 1, 6, 28, 3  # rounds; WARM of the TIMED ones do not count
RATES, DELAYS = (200.0, 500.0, 1000.0), (5.0, 10.0, 20.0)  # Mbit/s, ms one way
SLOW = 300.0  # Mbit/s of each of these hosts where it is to matter


def parameters(hidden: int) -> int:
    """Return the number of parameters of the MLP."""
    return (64 + 1) * hidden + (hidden + 1) * 10


def bytes_of_runs(tools: Path, folder: Path) -> Iterator[list[str]]:
    """Yield a line for each transport: bytes per round as counted, and as the hosts have sent them."""
    for transport in TRANSPORTS:
        network, counted, sent = Network(tools, len(SPREAD)), [], []
        with hosts.up(network):
            for rounds in (FEW, MANY):
                before = hosts.sent(network)
                lines = train(network, transport, SPREAD, rounds, WIDE, folder)
                counted.append(sum(int(line["wire_down_bytes"]) + int(line["wire_up_bytes"]) for line in lines))
                sent.append(hosts.sent(network) - before)
        rounds, more = MANY - FEW, sent[1] - sent[0]
        counted_per_round = (counted[1] - counted[0]) / rounds
        yield [
            transport,
            *(f"{value / 1e6:.2f}" for value in (counted_per_round, more.bytes / rounds)),
            *(f"{value / rounds / counted_per_round:.4f}" for value in (more.bytes, more.payload)),
            str(more.again),
        ]


def train(
    network: Network, transport: str, ranks: Sequence[int], rounds: int, hidden: int, folder: Path
) -> list[dict[str, str]]:
    """Run FedAvg with a client per rank and return the lines of its metrics."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "config.yaml").write_text(dump(settings(sum(ranks), rounds, hidden)))
    command = ["-m", "pflmpi", "run", f"{folder}/config.yaml", "--out", f"{folder}/run", "--quiet"]
    hosts.run(network, transport, ranks, command)
    return metrics_file.read(folder / "run")


def settings(clients: int, rounds: int, hidden: int) -> dict[str, object]:
    """Return the configuration: little to train, much to send."""
    return {
        "data": {"name": "digits", "limit": 20 * clients},
        "partition": {"name": "iid", "clients": clients},
        "model": {"name": "mlp", "hidden": hidden},
        "algorithm": {"name": "fedavg"},
        "training": {"rounds": rounds, "participation": 1.0, "epochs": 1, "batch_size": 100, "lr": 0.01},
        "evaluation": {"every": 1000},
        "checkpoint": {"every": 1000},
        # Rank 0 trains as long as the others: its exchange then has no waiting for them.
        "runtime": {"device": "cpu", "server": "shared", "timeout": 120.0},
    }


def seconds_of_rounds(tools: Path, folder: Path) -> Iterator[list[str]]:
    """Yield a line for each network, payload and transport: seconds of communication per round."""
    cases = [(Network(tools, len(SPREAD)), hidden) for hidden in (WIDE, NARROW)]
    cases += [(Network(tools, len(SPREAD), rate=rate), WIDE) for rate in RATES]
    cases += [(Network(tools, len(SPREAD), delay=delay), NARROW) for delay in DELAYS]
    cases += [(Network(tools, len(SPREAD), delay, SLOW), WIDE) for delay in DELAYS]
    for network, hidden in cases:
        for transport in TRANSPORTS:
            with hosts.up(network):
                lines = train(network, transport, SPREAD, TIMED, hidden, folder)[WARM:]
            low, middle, high = statistics.quantiles([float(line["exchange_seconds"]) for line in lines], n=4)
            yield [
                str(network),
                f"{4 * parameters(hidden) / 1e6:.2f}",
                transport,
                f"{middle:.3f}",
                f"{(high - low) / middle:.0%}",
            ]


def table(columns: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table as its rows come."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def report(tools: Path, folder: Path) -> Iterator[str]:
    """Yield the lines of the report."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "mpi4py", "pflmpi"))
    mpi = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    yield f"{len(cores())} cores, Python {platform.python_version()}, {versions}, {mpi}."
    yield from ("", f"## One round of FedAvg with {4 * parameters(WIDE) / 1e6:.1f} MB of parameters", "")
    columns = ["transport", "counted MB", "sent MB", "sent / counted", "payload / counted", "retransmitted"]
    yield from table(columns, bytes_of_runs(tools, folder))
    yield from ("", "## Seconds of communication per round, 3 hosts with one rank each", "")
    columns = ["network", "parameters MB", "transport", "exchange s", "quartile spread"]
    yield from table(columns, seconds_of_rounds(tools, folder))


def main() -> None:
    """Measure and print, and leave no host behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netns", type=Path, metavar="DIR", help="folder of nsup, nsdown, nsagent and delaysw.py")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    options = parser.parse_args()
    if options.netns is None or not (options.netns / "nsup").exists():
        parser.error("--netns DIR: a folder with nsup, nsdown, nsagent and delaysw.py")
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in report(options.netns.resolve(), Path(folder)):
                print(line, flush=True)
                lines.append(line)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
    if options.out:
        options.out.write_text("\n".join(["# Communication between several hosts", "", *lines]) + "\n")


if __name__ == "__main__":
    main()

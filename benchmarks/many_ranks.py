"""One client per rank, the classic layout: start-up time and memory of many ranks on one machine, beside their floor.

    python benchmarks/many_ranks.py --ranks 21 [--rounds 5]

The floor is what any program of that kind costs: as many ranks that do nothing but `import torch`. Memory is the
proportional share (PSS): pages that ranks share are counted once. Seconds are on this machine, with its few cores.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,sm,self",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
FLOOR = "import sys, time, torch; open(sys.argv[1] + '/' + str(__import__('os').getpid()), 'w'); time.sleep(600)"


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        floor = measure_floor(options.ranks, folder)
        ours = measure_run(options.ranks, options.rounds, folder)
    rounds = f"digits, FedGMH, {options.rounds} rounds"
    lines = [
        f"{options.ranks} ranks under mpirun, {options.ranks - 1} clients, {os.cpu_count()} cores:",
        "",
        "| | all ranks started, s | first round done, s | PSS per rank, MB: median (maximum) | CPU time of the server "
        "rank, s |",
        "|---|---|---|---|---|",
        f"| `import torch` alone | {floor[0]:.1f} | - | {memory(floor[1])} | - |",
        f"| {rounds} | {ours[0]:.1f} | {ours[1]:.1f} | {memory(ours[2])} | {ours[3]:.1f} |",
        "",
        f"Whole run {ours[4]:.1f} s; start-up takes {ours[0] / floor[0]:.2f} and memory "
        f"{statistics.median(ours[2]) / statistics.median(floor[1]):.2f} times what `import torch` alone does.",
    ]
    print("\n".join(lines))


def memory(values: list[float]) -> str:
    """Return median and largest."""
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


def measure_floor(ranks: int, folder: Path) -> tuple[float, list[float]]:
    """Return the seconds until all ranks have imported torch, and the memory of each."""
    there = folder / "floor"
    there.mkdir()
    start = time.monotonic()
    process = subprocess.Popen(
        [str(BIN / "mpirun"), "-n", str(ranks), sys.executable, "-c", FLOOR, str(there)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(list(there.iterdir())) < ranks:
        assert process.poll() is None, "mpirun has ended"
        time.sleep(0.05)
    seconds = time.monotonic() - start
    used = [share(int(file.name)) for file in there.iterdir()]
    process.terminate()
    process.wait()
    return seconds, used


def measure_run(ranks: int, rounds: int, folder: Path) -> tuple[float, float, list[float], float, float]:
    """Return the seconds to the first checkpoint and to the first round, memory, the server's seconds, and all."""
    clients = ranks - 1
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": clients},
        "model": {"name": "cnn", "kernel": 3, "padding": 1, "hidden": 64},
        "algorithm": {"name": "fedgmh"},
        "training": {"rounds": rounds, "epochs": 2, "lr": 0.05},
        "runtime": {"device": "cpu"},
    }
    path, run = folder / "config.yaml", folder / "run"
    path.write_text(yaml.safe_dump(config))
    start = time.monotonic()
    process = subprocess.Popen(
        [str(BIN / "mpirun"), "-n", str(ranks), str(BIN / "pflmpi"), "run", str(path), "--out", str(run)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    moments: dict[str, float] = {}

    def read() -> None:
        for line in process.stderr or ():
            moments.setdefault(line.split(" ")[0] if line.startswith("round") else "other", time.monotonic() - start)

    reader = threading.Thread(target=read)
    reader.start()
    up = used = None
    pids: list[int] = []
    served = 0.0
    while process.poll() is None:
        if up is None and (run / "round_00000.h5").exists():
            up = time.monotonic() - start
        if "round" in moments and used is None:
            pids = ranks_of(str(run))
            used = [share(pid) for pid in pids]
        if pids:
            served = max(served, processor_seconds(min(pids)))
        time.sleep(0.02)
    reader.join()
    assert process.returncode == 0 and up and used, (process.returncode, up, used)
    shutil.rmtree(run)
    return up, moments["round"], used, served, time.monotonic() - start


def ranks_of(run: str) -> list[int]:
    """Return the processes that are ranks of a run."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if run.encode() in words and b"python" in words[0]:
            pids.append(int(entry.name))
    return pids


def share(pid: int) -> float:
    """Return the proportional share of memory of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

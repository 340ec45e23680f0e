"""Minutes on one GPU, in one command: checks and timings in processes of their own, each with a time limit.

    launch/gpu-check [--out DIR] [--seconds 540] [--only STEP ...] [--device cpu --tiny]

Needs no network and no installation: a Python that has torch and what pflmpi imports, in the root of a checkout. What
has not passed on a card yet comes first. DIR/gpu_check.jsonl gets a line for each figure as it is measured, so that
what was measured is there even if the time ends; DIR/gpu_check.log what the steps printed. A step for which too little
time is left, or that exceeds its limit, is named. Exit code 1 if a step failed.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
_ENOUGH = 0.4  # share of its limit that must be left for a step to begin

Say = Callable[..., None]


def failed_capture(say: Say, options: argparse.Namespace) -> None:
    """After a capture that fails, memory that several streams have used is given back as before."""
    import torch

    from pflmpi.learning.cuda_graphs import cuda_graph
    from pflmpi.runtime.executors.transfers import upload

    device = prepare(options)
    rows = {"rows": torch.zeros(2**24 if not options.tiny else 16)}  # 64 MiB

    def grown() -> float:
        before = torch.cuda.memory_reserved()
        for _ in range(40):
            upload(rows, device)["rows"].add_(1)
            torch.cuda.synchronize()
        return (torch.cuda.memory_reserved() - before) / 2**20

    if device.type == "cpu":
        return say(left_out="a CPU captures nothing")
    before, reason = grown(), ""
    try:
        cuda_graph(lambda: torch.ones(1, device=device).item())
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    after = grown()
    return say(mib_before=before, mib_after=after, reason=reason, holds=bool(reason) and after <= before + 64)


def captures(say: Say, options: argparse.Namespace) -> None:
    """A step is traced twice and captured once in a run; captured, plain and second runs have the same bits."""
    from unittest import mock

    import torch

    import stub_run
    from every_algorithm import every_algorithm
    from pflmpi.learning import replay
    from pflmpi.learning.cuda_graphs import BY_DEVICE, cuda_graph

    cases = "mlp lanes fedavg, cnn lanes fedavg, cnn loop fedgmh-full, cnn lanes fedfcd-full, resnet18 loop fedavg"
    for model, executor, case in map(str.split, cases.split(", ")[: 1 if options.tiny else None]):
        for precision in ("fp32", "bf16") if options.device == "cpu" else ("fp32", "tf32", "bf16"):
            device = prepare(options, precision)
            raw = stub_run.settings(every_algorithm()[case], model, executor, steps=8)
            raw["training"] |= {"rounds": 3, "lr_decay": 0.99, "precision": precision}
            with (
                mock.patch.dict(BY_DEVICE, {"cuda": mock.Mock(side_effect=cuda_graph)}),
                mock.patch.object(replay, "Recording", side_effect=replay.Recording) as traced,
            ):
                once = stub_run.run(raw, False, device).values
                made = BY_DEVICE["cuda"].call_count  # type: ignore[attr-defined]
            again = stub_run.run(raw, False, device).values
            with replay.without_replay():
                plain = stub_run.run(raw, False, device).values
            same = all(torch.equal(once[path], again[path]) and torch.equal(once[path], plain[path]) for path in once)
            what = f"{case}, {model}, {executor}, {precision}"
            say(what=what, traced=traced.call_count, captures=made, holds=same and (made > 0 or device.type == "cpu"))


def messages(say: Say, options: argparse.Namespace) -> None:
    """Messages by NCCL on ranks that share the GPU, with the tests of every transport."""
    if options.device == "cpu":
        return say(left_out="NCCL needs a GPU")
    worker, folder = ROOT / "tests" / "helpers" / "transport_worker.py", options.out
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(worker)]
    done = subprocess.run([*words, "nccl", str(folder)], capture_output=True, text=True, env=environment())
    return say(holds=done.returncode == 0, error=done.stderr.splitlines()[-3:] if done.returncode else "")


def workloads(say: Say, options: argparse.Namespace) -> None:
    """Published workloads as their authors have them, beside an eager and a graphed loop: seconds of a round."""
    from dataclasses import replace

    import gpu

    for name, workload in gpu.WORKLOADS.items():
        if options.tiny:
            workload = replace(workload, clients=4, samples=20, participants=2, epochs=1, batch=10, rounds=2)
        product, eager, graphed, busy, experiment = gpu.timed(workload, prepare(options))
        ratio, lanes = round(product / graphed, 3), experiment.config.runtime.lanes
        say(work=name, round=product, eager=eager, graphed=graphed, ratio=ratio, busy=busy, lanes=lanes)
        if options.tiny:
            break


def sums(say: Say, options: argparse.Namespace) -> None:
    """The mean of ten models that are on the GPU has the bits of the host's; seconds of each."""
    import numpy as np
    import torch

    from pflmpi import tree
    from pflmpi.learning.task import HOST
    from pflmpi.messages.declared import Declared
    from pflmpi.messages.kinds import Mean, Messages, tensor
    from pflmpi.messages.uplink import send_up
    from pflmpi.transports.inprocess import InProcessTransport

    device, clients, size = prepare(options), np.arange(10), 1000 if options.tiny else 11_181_642
    declared = Declared({"model": Mean({"x": tensor(size)})}, {}, np.ones((10, 2), bool), np.arange(7, 17))
    rows: tree.Tree = {"x": torch.randn(10, size) * torch.logspace(-20, 5, size)}
    means = []
    for place in (HOST, device):
        message: Messages = {"model": tree.to(rows, place)}
        for _ in range(2):
            began = time.perf_counter()
            up = send_up(InProcessTransport(), declared, [(clients, message)], [[clients]], place)
            seconds = time.perf_counter() - began
        means.append(tree.at({**(up or {})}, "model/x"))
        say(place=place.type, seconds=seconds, holds=bool(torch.equal(means[0], means[-1])))


def passes(say: Say, options: argparse.Namespace) -> None:
    """What decides how clients go side by side: steps or passes in a graph, 1 to 8 clients on streams of it.

    Each is compared with one client's steps in a graph of their own, in time and, for as many steps, in bits.
    """
    from dataclasses import replace

    import gpu
    import torch

    for name, workload in gpu.WORKLOADS.items():
        if options.tiny:
            workload = replace(workload, clients=4, samples=20, participants=2, epochs=1, batch=10, rounds=2)
        device, ends = prepare(options), dict[int, torch.Tensor]()
        experiment = gpu.prepared(workload, device)
        steps = min(workload.epochs * workload.samples // workload.batch, 10)
        for together, in_graph in ((1, 1), (1, steps), (2, 1), (2, steps), (4, 1), (4, steps), (8, 1), (8, steps)):
            seconds, weights = gpu.side_by_side(experiment, workload, together, in_graph)
            holds = torch.equal(weights, ends.setdefault(in_graph, weights))
            say(work=name, clients=together, steps=in_graph, milliseconds_a_step=1e3 * seconds, holds=holds)
        if options.tiny:
            break


def papers(say: Say, options: argparse.Namespace) -> None:
    """The papers' algorithms at FedGMH's sizes: 100 clients, 20 a round, two epochs, batch 100; seconds by part."""
    import statistics
    import tempfile

    import gpu

    from pflmpi.experiment import run
    from pflmpi.experiment.run import RankContext
    from pflmpi.runtime.progress import Progress
    from pflmpi.transports.inprocess import InProcessTransport

    sizes = (8, 20, 2, 10) if options.tiny else (100, 450, 20, 100)
    workload = gpu.Workload("FedGMH", gpu.CIFAR, 10, {"name": "cnn"}, *sizes, epochs=2, rounds=3 if options.tiny else 6)
    for name in ("fedavg", "fedgmh", "fedfcd", "pfedpm", "pfedafe", "pfedcfr")[: 1 if options.tiny else None]:
        device = prepare(options)
        experiment, seen = gpu.prepared(workload, device, name, lr_decay=0.99), list[Progress]()
        context = RankContext(InProcessTransport(), device, 1, ("GPU",) if device.type == "cuda" else ())
        with tempfile.TemporaryDirectory() as folder:
            everyone = experiment.division.everyone
            run.run(experiment.config, Path(folder) / "run", context, seen.append, federation=everyone)
        parts = [one.seconds for one in seen[1:-1]]
        say(algorithm=name, **{part: statistics.median(each[part] for each in parts) for part in parts[0]})


def promises(say: Say, options: argparse.Namespace) -> None:
    """The same bits in lanes and in a loop on 1, 2 and 4 ranks that share the GPU, and after a continuation."""
    import gpu

    executors, ranks = (["lanes"], [1, 2]) if options.tiny else (["lanes", "loop"], [1, 2, 4])
    with contextlib.redirect_stdout(io.StringIO()) as text:
        gpu.promises(options.device, executors, ranks)
    for line in text.getvalue().splitlines():
        say(what=line, holds=line.endswith("yes"))


# Seconds at most. What has not passed on a card comes first, and what has passed last.
STEPS: dict[str, tuple[float, Callable[[Say, argparse.Namespace], None]]] = {
    "sums": (40, sums),
    "failed_capture": (60, failed_capture),
    "captures": (150, captures),
    "workloads": (180, workloads),
    "passes": (90, passes),
    "papers": (90, papers),
    "messages": (90, messages),
    "promises": (150, promises),
}


def main() -> int:
    """Run the steps, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540, help="for all steps together")
    parser.add_argument("--only", nargs="*", metavar="STEP", choices=STEPS, default=list(STEPS), help=", ".join(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="to see that all of this runs")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        STEPS[options.step][1](lambda **figures: write(options, options.step, figures), options)
        return 0
    if problem := obstacle(options.device):
        print(f"gpu-check: {problem}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    return max(run_step(name, end, options) for name in options.only)


def obstacle(device: str) -> str:
    """Why nothing can be checked here; "" if it can."""
    try:
        import torch

        import pflmpi.experiment.build  # noqa: F401
    except ImportError as error:
        return f"{sys.executable} cannot import what pflmpi needs ({error}); name another Python by PYTHON=..."
    if device == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device here; nvidia-smi and `pflmpi doctor` say more"
    return ""


def run_step(name: str, end: float, options: argparse.Namespace) -> int:
    """Run a step in a process of its own; 1 if it failed, exceeded its limit or found something that does not hold."""
    limit, left, began = STEPS[name][0], end - time.monotonic(), time.monotonic()
    if left < _ENOUGH * limit:
        write(options, name, {"left_out": f"{max(left, 0):.0f} s are left"})
        return 0
    words = [sys.executable, __file__, "--step", name, "--out", str(options.out), "--device", options.device]
    results = options.out / "gpu_check.jsonl"
    before = results.stat().st_size if results.exists() else 0
    with open(options.out / "gpu_check.log", "a") as log:
        log.write(f"==== {name}\n")
        log.flush()
        process = subprocess.Popen(
            [*words, *["--tiny"] * options.tiny], stdout=log, stderr=log, env=environment(), start_new_session=True
        )
        try:
            code: int | str = process.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            code = f"killed after {min(limit, left):.0f} s"
        with contextlib.suppress(ProcessLookupError):  # its own processes too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = results.read_text()[before:].splitlines() if results.exists() else []
    print(*lines, sep="\n", flush=True)
    broken = [line for line in lines if json.loads(line).get("holds") is False]
    write(options, name, {"ended": code, "seconds": round(time.monotonic() - began, 1)})
    return int(code != 0 or bool(broken))


def write(options: argparse.Namespace, step: str, figures: dict[str, Any]) -> None:
    """Append a line of figures, and show it."""
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    line = json.dumps({"step": step, **rounded})
    with open(options.out / "gpu_check.jsonl", "a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def environment() -> dict[str, str]:
    """That of a step: the checkout need not be installed."""
    paths = [str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def prepare(options: argparse.Namespace, precision: Any = "fp32") -> Any:
    """The device, with its kernels fixed as in a run."""
    from pflmpi.learning.training import TrainingConfig
    from pflmpi.runtime.config import RuntimeConfig
    from pflmpi.runtime.devices import choose_device, fix_kernels

    runtime = RuntimeConfig(device=options.device)
    device = choose_device(runtime)
    fix_kernels(device, runtime, TrainingConfig(precision=precision))
    return device


if __name__ == "__main__":
    sys.exit(main())

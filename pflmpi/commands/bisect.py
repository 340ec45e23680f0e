"""Find the first round, client and array in which two runs differ, and what they were run with.

pflmpi bisect runs/mine runs/again
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi.text import for_shell, format_ranges, join_truncated, printable

if TYPE_CHECKING:
    from pflmpi.analysis.bisection import Bisection
    from pflmpi.analysis.run import Run

_DIFFER = 1  # exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, metavar="RUN", help=f"the folder of the {name} run")
    parser.add_argument(
        "--replay",
        action="store_true",
        help="run the rounds between two checkpoints again, from the last that is the same, in a temporary folder; "
        "needs the data, and executes code that the runs name",
    )


def run(options: argparse.Namespace) -> int:
    from pflmpi.analysis.bisection import bisect
    from pflmpi.analysis.run import read_run

    runs = read_run(options.first), read_run(options.second)
    bisection = bisect(*runs)
    if options.replay and bisection.same is not None and bisection.between:
        with tempfile.TemporaryDirectory(prefix="pflmpi-bisect-") as folder:
            replayed = [_replay(run, bisection, Path(folder, str(number))) for number, run in enumerate(runs)]
            _show(replayed[0], replayed[1], bisect(*replayed))
    else:
        _show(runs[0], runs[1], bisection)
        if bisection.between:
            command = f"pflmpi bisect {for_shell(options.first)} {for_shell(options.second)} --replay"
            can_replay = bisection.same is not None and not options.replay
            _print(
                f"could not be looked at: round {format_ranges(bisection.between)}, without a checkpoint in both"
                f"{f'; `{command}` runs them again' if can_replay else ''}"
            )
    _show_settings(*runs)
    return 0 if bisection.first is None else _DIFFER


def _replay(run: "Run", bisection: "Bisection", out: Path) -> "Run":
    """Run the rounds from the last equal checkpoint to the first different one again, with a checkpoint of each."""
    from pflmpi.config.sections import merge
    from pflmpi.experiment import stored_config
    from pflmpi.experiment.fork import fork
    from pflmpi.python.run import run as start

    same, differs = bisection.same, bisection.first
    assert same is not None and differs is not None
    values = stored_config.values(run.path)
    training = {"rounds": differs, "stop": None}
    if values["training"].get("schedule") == "cosine" and values["training"].get("decay_rounds") is None:
        warmup = values["training"].get("warmup", 0)
        training["decay_rounds"] = max(values["training"]["rounds"] - warmup, 1)  # its default, of the whole run
    changes = {"training": training, "checkpoint": {"every": 1, "keep": 0}, "output": {"trackers": []}}
    fork(run.path, out, same, merge(values, changes))
    replayed = start(out / "config.yaml", out=out, resume=True, quiet=True)
    if replayed.round(differs).digest() != run.round(differs).digest():
        _print(f"{run.path}: run again from round {same}, round {differs} is not as recorded")
    return replayed


def _show(first: "Run", second: "Run", bisection: "Bisection") -> None:
    from pflmpi.analysis.bisection import differing_arrays

    same, differs = bisection.same, bisection.first
    if differs is None:
        _print(f"the same: round {same}, the newest with a checkpoint in both")
    else:
        before = "" if same is None else f"; round {same} is the same in both"
        _print(f"the first checkpoint that differs: round {differs}{before}")
        server, clients = differing_arrays(first.round(differs), second.round(differs))
        if clients:
            client, paths = next(iter(clients.items()))
            _print(f"the first of {len(clients)} clients that differ: client {client}, {join_truncated(paths)}")
        if server:
            _print(f"of the server: {join_truncated(server)}")
    if bisection.figures is not None:
        _print(f"metrics.csv: figures differ first in round {bisection.figures}")


def _show_settings(first: "Run", second: "Run") -> None:
    from pflmpi.analysis.bisection import differing_settings

    settings = [*differing_settings(first, second)]
    for key, value, other in settings:
        _print(f"{key}: {value} and {other}")
    if not settings:
        _print("configuration, data, code, device and versions are the same")


def _print(text: str) -> None:
    print(printable(text))

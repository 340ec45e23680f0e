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
    """Print where two runs part and what differs in their settings; return the exit code."""
    from pflmpi.analysis.bisection import bisect
    from pflmpi.analysis.run import open_run

    runs = open_run(options.first), open_run(options.second)
    found = bisect(*runs)
    if options.replay and found.same is not None and found.between:
        with tempfile.TemporaryDirectory(prefix="pflmpi-bisect-") as folder:
            replayed = [_replay(run, found, Path(folder, str(number))) for number, run in enumerate(runs)]
            _show(replayed[0], replayed[1], bisect(*replayed))
    else:
        _show(runs[0], runs[1], found)
        if found.between:
            again = f"; `pflmpi bisect {for_shell(options.first)} {for_shell(options.second)} --replay` runs them again"
            _say(
                f"could not be looked at: round {format_ranges(found.between)}, without a checkpoint in both"
                f"{again if found.same is not None and not options.replay else ''}"
            )
    _show_settings(*runs)
    return 0 if found.first is None else _DIFFER


def _replay(run: "Run", found: "Bisection", out: Path) -> "Run":
    """A run of the rounds after the last that is the same up to the first that is known to differ, all kept."""
    from pflmpi.config.sections import merge
    from pflmpi.experiment import stored_config
    from pflmpi.experiment.fork import fork
    from pflmpi.python.run import run as start

    assert found.same is not None and found.first is not None
    values = stored_config.values(run.path)
    training = {"rounds": found.first, "stop": None}
    if values["training"].get("schedule") == "cosine" and values["training"].get("decay_rounds") is None:
        warmup = values["training"].get("warmup", 0)
        training["decay_rounds"] = max(values["training"]["rounds"] - warmup, 1)  # as it is without
    changes = {"training": training, "checkpoint": {"every": 1, "keep": 0}, "output": {"trackers": []}}
    fork(run.path, out, found.same, merge(values, changes))
    again = start(out / "config.yaml", out=out, resume=True, quiet=True)
    if again.round(found.first).digest() != run.round(found.first).digest():
        _say(f"{run.path}: run again from round {found.same}, round {found.first} is not as recorded")
    return again


def _show(first: "Run", second: "Run", found: "Bisection") -> None:
    from pflmpi.analysis.bisection import differing_arrays

    if found.first is None:
        _say(f"the same: round {found.same}, the newest with a checkpoint in both")
    else:
        before = "" if found.same is None else f"; round {found.same} is the same in both"
        _say(f"the first checkpoint that differs: round {found.first}{before}")
        server, clients = differing_arrays(first.round(found.first), second.round(found.first))
        if clients:
            client, paths = next(iter(clients.items()))
            _say(f"the first of {len(clients)} clients that differ: client {client}, {join_truncated(paths, 4)}")
        if server:
            _say(f"of the server: {join_truncated(server, 4)}")
    if found.figures is not None:
        _say(f"metrics.csv: figures differ first in round {found.figures}")


def _show_settings(first: "Run", second: "Run") -> None:
    from pflmpi.analysis.bisection import differing_settings

    settings = [*differing_settings(first, second)]
    for key, one, other in settings:
        _say(f"{key}: {one!s} and {other!s}")
    if not settings:
        _say("configuration, data, code, device and versions are the same")


def _say(text: str) -> None:
    print(printable(text))

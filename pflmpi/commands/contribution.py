"""Measure what clients contribute: run again without each of them, and compare the accuracy of the others.

pflmpi contribution runs/mine --clients 2,5 --out left-out
"""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, atomic
from pflmpi.commands.launch import check_alone
from pflmpi.errors import ConfigError
from pflmpi.text import format_csv

if TYPE_CHECKING:
    from pflmpi.analysis.run import Run

_COLUMNS = ("client", "others with it (%)", "others without it (%)", "contribution (points)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    arguments.add_run(parser)
    parser.add_argument(
        "--clients",
        type=arguments.parse_clients,
        required=True,
        metavar="ID,...",
        help="leave out each of these clients",
    )
    parser.add_argument(
        "--from",
        type=int,
        default=0,
        metavar="ROUND",
        dest="round",
        help="the checkpoint after which a client is left out (default: 0, it never trains)",
    )
    out = "folder of the runs, without-ID, and of contribution.csv; started again, it goes on there"
    arguments.add_out(parser, out, required=True)
    parser.add_argument("--ranks", type=int, metavar="N", help="processes of each run (default: one per GPU, or core)")


def run(options: argparse.Namespace) -> int:
    from rich.table import Table

    from pflmpi.terminal import console

    check_alone("contribution")
    whole = _read_run(options)
    last = whole.newest()[0]
    if last.number != whole.config["training"]["rounds"] and not whole.stopped_early:
        raise ConfigError(f"{options.run} has not reached its last round; resume it first")
    if last.metric("accuracy") is None:
        task = whole.config["data"].get("task")
        raise ConfigError(f"{options.run} has no accuracy, which contribution compares (data.task = {task})")
    lines = []
    for client in dict.fromkeys(options.clients):
        without = _run_without(whole, client, options)  # first, because it refuses an unknown client
        with_it, without_it = _mean_of_others(whole, client), _mean_of_others(without, client)
        lines.append([str(client), *(f"{100 * value:.2f}" for value in (with_it, without_it, with_it - without_it))])
    table = Table(*_COLUMNS)
    for line in lines:
        table.add_row(*line)
    console().print(table)
    with atomic.explain_write_error(options.out, "choose another --out"):
        atomic.write(options.out / "contribution.csv", format_csv([list(_COLUMNS), *lines]).encode())
    return 0


def _read_run(options: argparse.Namespace) -> "Run":
    """The whole run, with the sections that overrides change; these may not change its results."""
    from pflmpi.analysis.run import read_run
    from pflmpi.config.sections import override
    from pflmpi.experiment import stored_config

    whole = read_run(options.run)
    if not options.overrides:
        return whole
    sections = override(stored_config.values(options.run), options.overrides)
    stored_config.checked_config(options.run, sections)  # refuses others
    return replace(whole, sections={name: now for name, now in sections.items() if now != whole.config.get(name)})


def _run_without(whole: "Run", client: int, options: argparse.Namespace) -> "Run":
    """Start or resume the run without a client, to the last round that the whole run has now."""
    from pflmpi.analysis.run import read_run
    from pflmpi.config.keywords import Config
    from pflmpi.python.run import run as start
    from pflmpi.store import config_file

    folder, changes = options.out / f"without-{client}", _training_without(whole, client)
    if not config_file.path(folder).exists():
        options.out.mkdir(parents=True, exist_ok=True)
        whole.fork(folder, round=options.round, training=changes)
    forked = read_run(folder)
    origin, expected = forked.forked_from, (whole.recorded["run"], options.round)
    is_fork = origin is not None and (origin.run, origin.round) == expected
    if not is_fork or forked.config["training"]["rounds"] > changes["rounds"]:
        problem = f"{folder} is no fork of {whole.path} after round {options.round} that ends where that run did"
        raise ConfigError(f"{problem}; choose another --out")
    config = Config.load(whole.path / "config.yaml").replace(**{**whole.sections, "training": changes})
    return start(config, out=folder, resume=True, quiet=True, ranks=options.ranks)  # refuses other options


def _training_without(whole: "Run", client: int) -> dict[str, Any]:
    """What to change in `training`: the client is left out, and the last round is that of the whole run."""
    training = whole.config["training"]
    without_clients = sorted({*(training.get("without_clients") or []), client})
    changes: dict[str, Any] = {"without_clients": without_clients, "rounds": whole.newest()[0].number}
    if not training.get("stop"):
        return changes
    if training.get("schedule") == "cosine" and training.get("decay_rounds") is None:  # falls as in the whole run
        changes["decay_rounds"] = max(training["rounds"] - training["warmup"], 1)
    return {**changes, "stop": None}


def _mean_of_others(run: "Run", client: int) -> float:
    """Mean accuracy of all clients but one at the end of a run, as a share."""
    import numpy as np

    return float(np.nanmean(np.delete(run.newest()[0].metrics["accuracy"], client)))

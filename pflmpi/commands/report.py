"""Make a page with figures over runs, or over scaling experiments.

pflmpi report runs/mine runs/fedavg --out report
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pflmpi import arguments
from pflmpi.commands import watch
from pflmpi.errors import CheckpointError, ConfigError, PflmpiError, show
from pflmpi.text import printable

_LEFT_OUT = 1  # exit code: something is missing on the page
_PAUSE = 2.0  # seconds between two looks for a new checkpoint
_RELOAD = 10  # seconds until a browser loads the page again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=arguments.parse_folder,
        nargs="+",
        metavar="RUN",
        help="folders of runs, or of many runs such as sweeps/NAME; or of scaling experiments",
    )
    out = "folder for the page and its figures (default: report; of one scaling experiment its own folder)"
    arguments.add_out(parser, out)
    parser.add_argument(
        "--target",
        type=float,
        action="append",
        default=[],
        metavar="SHARE",
        help="of runs: an accuracy such as 0.9, until which rounds, time and bytes are counted; may be given several "
        "times (default: the highest that all runs reach)",
    )
    for kind in ("png", "pdf"):
        parser.add_argument(f"--{kind}", action="store_true", help=f"of runs: every figure also as {kind.upper()}")
    parser.add_argument(
        "--csv",
        action="store_true",
        help="of runs: all numbers of every figure as CSV (default: of more than 100,000 those that are drawn)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="of runs: write the page, which then reloads itself, again after each checkpoint until the runs end",
    )
    arguments.add_extrapolation(parser)


def run(options: argparse.Namespace) -> int:
    """Write the page over runs or scaling experiments; return the exit code."""
    from pflmpi.scaling.experiment import FILE

    if scaled := [path for path in options.paths if (path / FILE).is_file()]:
        return _report_scaling(options, scaled)
    if options.to is not None:
        raise ConfigError("--to is for the report of scaling experiments, which `pflmpi scale` makes; leave it out")
    return _report_runs(options)


def _report_scaling(options: argparse.Namespace, scaled: Sequence[Path]) -> int:
    from pflmpi.commands.progress import bar
    from pflmpi.scaling.page import PAGE, write_page
    from pflmpi.scaling.records import made_by
    from pflmpi.scaling.results import read_results, write_table

    if others := [path for path in options.paths if path not in scaled]:
        raise ConfigError(f"{scaled[0]} is a scaling experiment, and {others[0]} is not; report them one by one")
    for name in ("watch", "target"):
        if getattr(options, name):
            raise ConfigError(f"--{name} is for the report of runs, not of scaling experiments; leave it out")
    experiments = [read_results(path) for path in scaled]
    out = options.out or (scaled[0] if len(scaled) == 1 else Path("report"))
    with bar("report") as update:
        problems = write_page(experiments, out, options.to, update, made_by(options.words))
    for experiment in experiments:
        write_table(experiment)
    return _finish(out / PAGE, [PflmpiError(problem) for problem in problems])


def _report_runs(options: argparse.Namespace) -> int:
    from pflmpi.analysis.metrics import check_target
    from pflmpi.analysis.report import PAGE, write_report
    from pflmpi.cluster.waiting import Writers
    from pflmpi.commands.progress import bar
    from pflmpi.scaling.records import made_by
    from pflmpi.store.runs import find_runs

    for target in options.target:
        check_target("--target", target)
    out = options.out or Path("report")
    pictures = [kind for kind in ("png", "pdf") if getattr(options, kind)]

    def list_checkpoints() -> dict[Path, int]:
        return _newest_checkpoints([*runs, *watch.find_runs(options.paths)]) if options.watch else {}

    writers, has_announced = Writers(), False
    while True:
        runs = [run for path in options.paths for run in find_runs(path) or [path]]  # `write_report` refuses others
        checkpoints = list_checkpoints()
        reload = _RELOAD if options.watch and watch.are_running(options.paths, writers) else 0
        with bar("report") as update:
            made = made_by(options.words)
            problems = write_report(runs, out, update, options.target, pictures, reload, made, options.csv)
        if not reload:
            break
        if not has_announced:
            print(printable(f"{out / PAGE} is written again after each checkpoint"), flush=True)
            has_announced = True
        while watch.are_running(options.paths, writers) and list_checkpoints() == checkpoints:
            time.sleep(_PAUSE)
    return _finish(out / PAGE, [CheckpointError(problem) for problem in problems])


def _newest_checkpoints(runs: Sequence[Path]) -> dict[Path, int]:
    """The round of the newest checkpoint of each run that has one."""
    from pflmpi.store.names import rounds

    return {run: max(written) for run in runs if (written := rounds(run))}


def _finish(page: Path, problems: Sequence[PflmpiError]) -> int:
    """Print the problems of runs that were left out, and the path of the page; return the exit code."""
    for problem in problems:
        show(problem)
    print(printable(page))
    return _LEFT_OUT if problems else 0

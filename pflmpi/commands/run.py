"""Run an experiment.

pflmpi run configs/quickstart.yaml --out runs/mine -s training.rounds=10 -s algorithm=fedavg
"""

import argparse
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi import arguments
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from pflmpi.transports.detect import Launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    arguments.add_out(parser, "folder of the run (default: runs/NAME-TIME)")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="resume",
        help="resume the run in --out if there is one (for batch jobs that are requeued); needs --out",
    )
    parser.add_argument("--has-checkpoint", action="store_true", help=argparse.SUPPRESS)  # as `submit` saw in --out
    arguments.add_changed_code(parser)
    arguments.add_take_over(parser)
    arguments.add_ranks(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.commands.rank import Prepared, run_rank
    from pflmpi.config.load import load
    from pflmpi.experiment import run as experiment
    from pflmpi.store.names import rounds
    from pflmpi.transports.detect import RESTARTED

    def prepare(launch: "Launch") -> Prepared:
        resumes = options.resume or launch.restarts > 0
        has_restarts = RESTARTED in os.environ or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if options.out is None and options.announced is None and (options.resume or has_restarts):
            by = "--continue" if options.resume else "a launcher with restarts"
            raise ConfigError(f"{by} without --out: a run that is started again must find its folder; give --out DIR")
        default = Path("runs") / f"{options.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = options.announced or options.out or default
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            folder.stat()  # raises for a name that is too long, as `exists` did before Python 3.14
        if options.has_checkpoint and not rounds(folder):
            raise ConfigError(
                f"{folder} has no checkpoint any more, from which this job was submitted to continue: it was moved or "
                "deleted since; put it back, or submit again, with --out where it is now"
            )
        arguments.check_config(options.config)
        if launch.kind == "alone" and not resumes:
            experiment.refuse_existing(folder)  # `experiment.run` does so too, but only on the ranks
        start = partial(experiment.run, resume="if_there" if resumes else "never", changed_code=options.changed_code)
        return Prepared(load(options.config, options.overrides), folder, start)

    return run_rank(options, prepare)

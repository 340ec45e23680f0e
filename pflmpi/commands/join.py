"""Join a run that is under way, from the end of a round on: more ranks share the clients."""

import argparse
from pathlib import Path

from pflmpi import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    arguments.add_run(parser)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes to start, if no launcher has (default: 1, this process)"
    )
    parser.set_defaults(quiet=True, bar=False, take_over=False, error_file=None, stop_at_eof=False, announced=None)


def run(options: argparse.Namespace) -> int:
    """Be ranks of the run until its end; return the exit code."""
    from pflmpi.commands.ranks.context import here
    from pflmpi.commands.ranks.rank import Prepared, run_rank
    from pflmpi.config.load import Config
    from pflmpi.experiment.execute import RankContext
    from pflmpi.experiment.joiner import Joiner
    from pflmpi.experiment.start import resume_joined
    from pflmpi.runtime.progress import Observer
    from pflmpi.transports.base import Transport
    from pflmpi.transports.detect import Launch

    def prepare(_: Launch) -> Prepared:
        joiner = Joiner.of(options.run)

        def join(launch: Launch) -> Transport:
            return joiner.join(launch, here(joiner.config))

        def start(config: Config, run: Path, context: RankContext, observe: Observer) -> Path:
            return resume_joined(config, run, context, observe, federation=joiner.federation, held=None)

        return Prepared(joiner.config, options.run, start, join)

    return run_rank(options, prepare)

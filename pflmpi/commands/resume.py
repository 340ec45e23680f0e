"""Continue a run from its newest good checkpoint.

pflmpi resume runs/mine -s training.rounds=60
"""

import argparse
from functools import partial

from pflmpi import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    arguments.add_run(parser)
    arguments.add_changed_code(parser)
    arguments.add_take_over(parser)
    arguments.add_ranks(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.commands.rank import Prepared, run_rank
    from pflmpi.experiment import run as experiment
    from pflmpi.experiment.stored_config import stored_config

    start = partial(experiment.run, resume="always", changed_code=options.changed_code)
    return run_rank(options, lambda _: Prepared(stored_config(options.run, options.overrides), options.run, start))

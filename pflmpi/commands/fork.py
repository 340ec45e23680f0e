"""Start a new run from a checkpoint of another, with other options or without some clients.

pflmpi fork runs/mine --round 28 --out runs/slower -s training.lr=0.001
"""

import argparse

from pflmpi import arguments
from pflmpi.text import for_shell, printable, short_repr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    arguments.add_run(parser)
    arguments.add_round(parser)
    arguments.add_out(parser, "folder of the new run, which needs no other", required=True)
    parser.add_argument(
        "--without-client",
        type=arguments.parse_clients,
        action="extend",
        default=[],
        metavar="ID,...",
        help="go on without these clients: they are drawn as before, and do not train (training.without_clients)",
    )
    arguments.add_changed_code(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.analysis.run import read_run
    from pflmpi.config.sections import override
    from pflmpi.experiment import stored_config
    from pflmpi.experiment.fork import fork, without_clients

    opened = read_run(options.run)
    round = arguments.open_checkpoint(opened, options).number
    values = override(stored_config.values(options.run), options.overrides)
    values = without_clients(values, options.without_client)
    record = fork(options.run, options.out, round, values, changed_code=options.changed_code)
    changes = ", ".join(
        f"{key} = {short_repr(value)} (was {short_repr(before)})" for key, (before, value) in record["changes"].items()
    )
    print(printable(f"{options.out}: {options.run} after round {round}, {changes or 'nothing is changed'}"))
    print(printable(f"continue it with `pflmpi resume {for_shell(options.out)}`"))
    return 0

"""Measure a configuration on several numbers of ranks."""

import argparse
import os
from pathlib import Path

from pflmpi import arguments
from pflmpi.cluster import batch_script
from pflmpi.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    arguments.add_config(parser)
    parser.add_argument("--ranks", required=True, metavar="R,R,...", help="numbers of ranks, ascending, such as 1,2,4")
    parser.add_argument(
        "--mode",
        choices=("strong", "weak", "packing"),
        default="strong",
        help="strong: the same work (default); weak: clients in proportion to ranks, from those of the configuration "
        "on the first number; packing: the same cores (as threads of ranks) or GPUs for all numbers of ranks",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each number of ranks (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=6, metavar="N", help="rounds of each run; the first does not count (default: 6)"
    )
    parser.add_argument("--out", type=arguments.folder, metavar="DIR", help="folder (default: scaling/NAME-MODE)")
    arguments.add_to(parser)
    parser.add_argument("--submit", action="store_true", help="submit each number of ranks as a Slurm job of its own")
    parser.add_argument(
        "--mpi",
        choices=("none", "pmix", "pmi2"),
        default="none",
        help="in Slurm jobs, what srun connects ranks with, as for submit (default: none, torch.distributed)",
    )
    parser.add_argument("--setup", type=Path, metavar="FILE", help="with --submit: shell commands that jobs run first")
    parser.add_argument("--dry-run", action="store_true", help="with --submit: print the batch scripts, submit nothing")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # the ranks of the point that a job is for
    parser.epilog = "inside a Slurm job each run is a step of it"
    batch_script.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure or submit what is not measured yet; return the exit code."""
    from pflmpi.commands.scale.measure import measure
    from pflmpi.commands.scale.submit import submit

    _check_alone()
    if options.submit and options.to is not None:
        raise ConfigError("--to with --submit, which ends before anything is measured; give it to `pflmpi report DIR`")
    if options.submit:
        return submit(options)
    of_slurm = {f"--{name}": value for name, value in batch_script.given(options).items()} | {"--": options.sbatch}
    for name, value in {**of_slurm, "--setup": options.setup, "--dry-run": options.dry_run}.items():
        if value:
            raise ConfigError(f"{name} is for --submit, which is not given; leave it out")
    return measure(options)


def _check_alone() -> None:
    from pflmpi.transports.detect import detect

    launch = detect(os.environ)
    if launch.kind != "alone":
        raise ConfigError(
            f"scale starts its runs by itself, and {launch.kind} has started this; start it without a launcher"
        )

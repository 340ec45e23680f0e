"""The command line. Only the parser is here; each command imports what it needs, so that `--help` is quick."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pflmpi import __version__
from pflmpi.commands.options import add_options

_COMMANDS = {
    "run": "run an experiment",
    "resume": "continue a run from its newest good checkpoint",
    "inspect": "show what a run holds, check it, compare two rounds, print its digest",
    "export": "write a client's model, or the server's state, as a file for other programs",
    "probe": "see how alike the layers of the clients' models are, for `report`; it needs torch and the data",
    "partition": "show who holds what, without running anything",
    "sweep": "run the cells of a table that are not done yet",
    "report": "make a page with figures over runs, or the table of a sweep",
    "plan": "predict memory, bytes, disk and seconds of a run before it is submitted",
    "submit": "write a Slurm batch script and submit it",
    "status": "show jobs, their rounds, accuracy and time left",
    "doctor": "look for what would break a run here, alone or on all ranks of a launcher",
    "list": "list algorithms, datasets, partitions and models",
    "schema": "print every key of a configuration: type, range, default",
}
_MODULES = {
    "run": "run",
    "resume": "run",
    "sweep": "sweep",
    "plan": "plan",
    "submit": "submit",
    "status": "status",
    "doctor": "doctor",
}  # the rest is shown
_MAY_BE_MISSING = ("torch", "torchvision", "pydantic")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="pflmpi",
        description="Personalised federated learning on clusters: alone, or under mpirun, torchrun or srun.",
        epilog="exit codes: 0 done; 1 a run of a sweep failed, the doctor found a problem, or a report left a run out; "
        "2 wrong input, nothing was started; 3 a fault during the run, continue it; 75 stopped after a complete round "
        "on a signal, continue",
    )
    top.add_argument("--version", action="version", version=f"pflmpi {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_options({name: commands.add_parser(name, help=text, description=text) for name, text in _COMMANDS.items()})
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    whole = parser()
    options, others = whole.parse_known_args(given)
    if others and options.command != "submit":
        whole.error(f"unrecognized arguments: {' '.join(others)}")
    options.sbatch = others
    try:
        module = import_module(f"pflmpi.commands.{_MODULES.get(options.command, 'showing')}")
        code: int = module.main(options, given)
    except ModuleNotFoundError as error:
        if error.name not in _MAY_BE_MISSING:
            raise
        text = (
            f"{options.command} needs {error.name}, which is not installed; report, inspect and export do without torch"
        )
        print(f"pflmpi: {text}", file=sys.stderr)
        return 2
    return code

"""Check the environment, alone or on all ranks of a launcher.

pflmpi doctor --config configs/quickstart.yaml
"""

import argparse
import logging
import os
from pathlib import Path

from pflmpi import arguments
from pflmpi.terminal import print_json

_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_out(parser, "folder that runs will write to: its file system is checked (default: runs)")
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="check this configuration's data too")
    arguments.add_json(parser)
    parser.set_defaults(log_level=logging.ERROR)  # what others warn of is among its problems


def run(options: argparse.Namespace) -> int:
    try:
        from pflmpi.doctor.run import check_environment
    except ImportError as error:  # one of the packages that even the doctor needs
        remedy = "install pflmpi with all that it needs: pip install -e . where its setup.cfg is"
        if options.json:
            print_json({"problems": [{"problem": str(error), "remedy": remedy, "ranks": [0]}], "ranks": []})
        else:
            print(f"problem: {error}; {remedy}")
        return _PROBLEM
    return check_environment(options.config, options.out, os.environ, options.json)

"""Compare the layers of the clients' models and count their errors, for `report`; it needs torch and the data.

pflmpi probe runs/mine
"""

import argparse
import os

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError
from pflmpi.machine import num_cores
from pflmpi.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    arguments.add_run(parser)
    arguments.add_changed_code(parser)
    arguments.add_round(parser)
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="test samples, at most (default: 256)")
    parser.add_argument(
        "--clients",
        type=int,
        default=20,
        metavar="N",
        help="clients, at most, spread evenly, of more than 100 over those that have trained (default: 20)",
    )


def run(options: argparse.Namespace) -> int:
    import numpy as np
    import torch

    from pflmpi.analysis.probe import LEAST_SAMPLES, compare_layers, probe_samples
    from pflmpi.analysis.run import read_run
    from pflmpi.analysis.selection import MOST_CLIENTS, pick_evenly_spaced
    from pflmpi.commands.progress import bar
    from pflmpi.experiment.evaluation import confusion
    from pflmpi.experiment.restore import reopen
    from pflmpi.store import probe_file

    if options.samples < LEAST_SAMPLES or options.clients < 2:
        raise ConfigError(
            f"--samples {options.samples} --clients {options.clients}: a comparison needs {LEAST_SAMPLES} samples and "
            "2 clients at least"
        )
    opened = read_run(options.run)
    round = arguments.open_checkpoint(opened, options)
    torch.set_num_threads(num_cores(os.environ))
    experiment = reopen(opened.path, options.overrides, changed_code=options.changed_code)
    samples = probe_samples(experiment.federation, options.samples, experiment.config.seed)
    candidates, trained = np.arange(round.num_clients), np.flatnonzero(round.trained)
    if round.num_clients > MOST_CLIENTS and len(trained) >= options.clients:
        candidates = trained
    clients = np.array(pick_evenly_spaced(candidates, options.clients))
    path = probe_file.path(opened.path, round.number)
    with bar("clients") as update:
        layers = compare_layers(round, experiment, clients, samples, update)
    with bar("groups of clients") as update:
        errors = confusion(experiment, opened.path, round.number, update)
    with atomic.explain_write_error(path, "probe a copy of the run"):
        probe_file.write(opened.path, probe_file.Probe(round.number, len(samples), layers, errors))
    print(printable(path))
    return 0

"""The experiment that the command line asks for, with what its folder has of it."""

import argparse
from pathlib import Path

from pflmpi.cluster.submission import refuse_transport
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError
from pflmpi.scaling import experiment, requested
from pflmpi.scaling.experiment import Scaling


def requested_experiment(
    options: argparse.Namespace, config: Config, on_gpus: bool, cores: int | None
) -> tuple[Scaling, Path]:
    """The experiment with what its folder has of it, and the folder; raise if it is impossible.

    Args:
        cores: of this machine; None in a Slurm job, which has as many as the largest point has ranks.
    """
    if cores is None:
        refuse_transport(config, options.mpi)
    elif config.runtime.transport == "mpi":
        raise ConfigError("runtime.transport = 'mpi', and processes of one machine use torch.distributed; set auto")
    numbers = requested.numbers(options.ranks)
    shared = 0 if on_gpus else cores or numbers[-1]
    new, remark = requested.scaling_of(config, numbers, options.mode, options.repeats, options.rounds, shared)
    out = options.out or Path("scaling") / f"{options.config.stem}-{options.mode}"
    scaling = experiment.join(new, out)
    requested.check(scaling)
    if remark and options.only is None:
        print(remark)
    return scaling, out

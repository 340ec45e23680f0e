"""Running whole experiments in this process: on one rank, or on threads that are ranks."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pflmpi.config import load as configuration
from pflmpi.experiment import run as experiment
from pflmpi.experiment.run import RankContext
from pflmpi.experiment.stored_config import stored_config
from pflmpi.runtime.faults import CollectiveError
from pflmpi.store import run_folder
from pflmpi.testing.thread_ranks import run_ranks
from pflmpi.transports.base import Transport

QUICK: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "exdir", "clients": 7, "classes_per_client": 3, "alpha": 0.7, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 12},
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": 3, "participation": 0.4, "epochs": 1, "batch_size": 10, "lr": 0.1},
    "runtime": {"device": "cpu"},
}


def settings(base: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """The quick configuration with sections replaced, or merged where both are mappings without a name.

    Args:
        base: sections that are put in first.
        sections: the others.
    """
    result = dict(QUICK)
    for changes in (base or {}, sections):
        for name, value in changes.items():
            merge = isinstance(value, dict) and "name" not in value
            result[name] = {**result.get(name, {}), **value} if merge else value
    return result


def _place(transport: Transport) -> RankContext:
    return RankContext(transport, torch.device("cpu"), 2)


def run(raw: dict[str, Any], folder: Path, ranks: int = 1) -> str:
    """Run an experiment and return the digest of its last round."""
    torch.set_num_threads(1)
    config = configuration.parse(raw)
    _on(ranks, lambda transport: experiment.run(config, folder, _place(transport), lambda progress: None))
    return digest(folder)


def resume(folder: Path, overrides: tuple[str, ...] = (), ranks: int = 1, changed_code: bool = False) -> str:
    """Continue a run and return the digest of its last round."""
    config = stored_config(folder, overrides)
    go = partial(experiment.run, resume="always", changed_code=changed_code)
    _on(ranks, lambda transport: go(config, folder, _place(transport), lambda progress: None))
    return digest(folder)


def digest(folder: Path) -> str:
    return run_folder.digest(folder, run_folder.rounds(folder)[-1])


def _on(ranks: int, function: Any) -> None:
    try:
        run_ranks(ranks, function)
    except CollectiveError as agreed:
        raise agreed.error from agreed

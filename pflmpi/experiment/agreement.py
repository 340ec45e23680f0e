"""All ranks must come to the same set-up by themselves: otherwise their collective calls would not fit together."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch

import pflmpi
from pflmpi.config import yaml_file
from pflmpi.config.load import Config
from pflmpi.data.federation import Federation
from pflmpi.errors import RunError
from pflmpi.experiment.build import Experiment
from pflmpi.runtime.faults import on_root
from pflmpi.runtime.setup import Setup
from pflmpi.transports.base import Transport
from pflmpi.transports.peers import names
from pflmpi.transports.text import gather_texts


def parts(config: Config, federation: Federation, code: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all ranks whatever their number, under the names that an error uses; causes first."""
    return {
        "the version": f"{pflmpi.__version__} {torch.__version__}",
        "the configuration": _hash(yaml_file.dump(config.resolved()).encode()),
        "the code from outside the package": _hash(repr(dict(code)).encode()),
        "the data": federation.dataset.digest,
        "the partition": federation.digest,
    }


def check_same_setup(experiment: Experiment, setup: Setup, transport: Transport) -> None:
    """Compare what every rank has made of the configuration.

    Raises:
        CollectiveError: on all ranks, naming those that differ from rank 0, and in what.
    """
    texts = gather_texts(transport, json.dumps(_parts(experiment, setup)))

    def compare() -> str:
        first, *others = map(json.loads, texts or ())
        for part, value in first.items():
            other = [rank for rank, found in enumerate(others, start=1) if found.get(part) != value]
            if other:
                raise RunError(
                    f"{names(other, transport.peers)}: {part} is not rank 0's; use one environment, one configuration "
                    "and the same data on all hosts (`pflmpi doctor`, started in the same way, compares them)"
                )
        return ""

    on_root(transport, compare)


def _parts(experiment: Experiment, setup: Setup) -> dict[str, str]:
    placement = setup.placement
    homes = b"" if placement.home is None else placement.home.tobytes()
    groups = b"".join(group.astype(np.int64).tobytes() for group in placement.groups)
    return {
        **parts(experiment.config, experiment.division.everyone, experiment.code),
        "the partition": experiment.division.digest,
        "the placement of clients": _hash(repr(placement.hosts).encode() + homes + groups),
    }


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""Partitions of a dataset among clients: pure functions; a line here is all that registers one.

    f(labels int64 [n], clients N, rng, *, parameters) -> each client's ascending sample indices, or (training, test)

`rng` is the only source of randomness. The signature is the declaration: keyword-only parameters, with their ranges
and descriptions, are the keys of the `partition` section; they need types, the first three need none. A function whose
first parameter is called `writers` gets the writer of each sample instead of its label; one whose `clients` may be None
can choose the number of clients itself.
"""

import inspect
from collections.abc import Callable

import numpy as np

from pflmpi.data.partitions.dirichlet import dirichlet, exdir
from pflmpi.data.partitions.iid import iid
from pflmpi.data.partitions.lognormal import lognormal
from pflmpi.data.partitions.nway_kshot import nway_kshot
from pflmpi.data.partitions.pathological import pathological
from pflmpi.data.partitions.pfllib import Split
from pflmpi.data.partitions.writers import writers
from pflmpi.errors import ConfigError
from pflmpi.registry import Registry

Partition = Callable[..., list[np.ndarray] | list[Split]]


def _accept(function: object) -> Partition:
    """Returns a function from outside the package after checking that it has the arguments of a partition."""
    if not inspect.isfunction(function):
        raise ConfigError(
            f"it is a {type(function).__name__}; expected a function f(labels, clients, rng, *, parameters)"
        )
    parameters = inspect.signature(function).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    if positional not in (["labels", "clients", "rng"], ["writers", "clients", "rng"]):
        raise ConfigError(
            f"{function.__qualname__} takes ({', '.join(positional)}); expected (labels, clients, rng), or (writers, "
            "clients, rng), and keyword-only parameters"
        )
    if reserved := {"name", "path"} & {*parameters}:
        raise ConfigError(f"{function.__qualname__}: partition.{reserved.pop()} is a key already; rename the parameter")
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is parameter.empty:
            raise ConfigError(
                f"{function.__qualname__}: {name} has no type; expected {name}: int, or float, bool, str, "
                "Literal[...], or a list of these"
            )
    return function


PARTITIONS: Registry[Partition] = Registry(
    "partition",
    {
        "pathological": pathological,
        "dirichlet": dirichlet,
        "exdir": exdir,
        "nway_kshot": nway_kshot,
        "lognormal": lognormal,
        "iid": iid,
        "writers": writers,
    },
    group="pflmpi.partitions",
    accept=_accept,
    section="partition",
)


WITHOUT_CLASSES = ("iid", "lognormal", "writers")  # those that make sense where labels are no classes


def get_partition_key(name: str) -> str:
    """Returns what a partition divides by, `labels` or `writers`: the name of its first parameter."""
    return next(iter(inspect.signature(PARTITIONS[name]).parameters))

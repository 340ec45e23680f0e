"""Partitions: one suite that every registered one passes."""

import inspect
from typing import Literal, get_origin

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partition_helpers import rng
from pflmpi.config.fields import partition_model
from pflmpi.data.partitions import PARTITIONS, get_partition_key
from pflmpi.errors import DataError

# What a partition of 10 classes among N clients is called with; N = 1 must hold all classes to be complete.
PARAMETERS = {
    "pathological": lambda clients: {"classes_per_client": 10 if clients < 5 else 2},
    "dirichlet": lambda clients: {"beta": 0.5, "min_samples": 2},
    "exdir": lambda clients: {"classes_per_client": 10 if clients < 5 else 2, "alpha": 0.5, "min_samples": 2},
    "nway_kshot": lambda clients: {"n": 3, "k": 6, "stdev": 1, "noise": 1},
    "lognormal": lambda clients: {"classes_per_client": 10 if clients < 5 else 2, "sigma": 1.0, "min_samples": 2},
    "iid": lambda clients: {},
    "writers": lambda clients: {},
}
INCOMPLETE = {"nway_kshot"}

every_partition = pytest.mark.parametrize("name", list(PARTITIONS))


def key_for(name, clients, samples=6000):
    """Return what a partition divides by: labels of 10 unequal classes, or as many writers as clients."""
    if get_partition_key(name) == "writers":
        key = np.concatenate([np.arange(clients), rng(1).integers(0, clients, samples - clients)])
    else:
        key = np.concatenate([np.repeat(np.arange(10), 50), rng(1).integers(0, 10, samples - 500)])
    key = rng(2).permutation(key).astype(np.int64)
    key.flags.writeable = False  # a partition that changed its input would fail
    return key


def draw(name, clients, seed=0):
    return PARTITIONS[name](key_for(name, clients), clients, rng(seed), **PARAMETERS[name](clients))


def is_well_formed(parts, samples):
    return (
        all(
            part.dtype == np.int64 and part.ndim == 1 and len(part) and (np.diff(part) > 0).all() and part[0] >= 0
            for part in parts
        )
        and max(int(part[-1]) for part in parts) < samples
    )


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@every_partition
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_every_client_has_ascending_samples_and_none_is_lost(name, clients):
    parts = draw(name, clients)
    assert len(parts) == clients and is_well_formed(parts, 6000)
    given = np.concatenate(parts)
    assert len(np.unique(given)) == len(given), "disjoint"
    if name not in INCOMPLETE:
        assert np.array_equal(np.sort(given), np.arange(6000)), "complete"


@every_partition
def test_the_same_seed_gives_the_same_partition_and_another_seed_another(name):
    assert same(draw(name, 20, seed=5), draw(name, 20, seed=5))
    if name != "writers":
        assert not same(draw(name, 20, seed=5), draw(name, 20, seed=6))


@every_partition
def test_more_clients_than_samples_are_refused_with_the_numbers(name):
    key = key_for(name, 10)[:30]
    with pytest.raises(DataError, match=r"\b31\b"):
        PARTITIONS[name](key, 31, rng(), **PARAMETERS[name](31))
    with pytest.raises(DataError, match=r"partition\.clients = 0: at least one client"):
        PARTITIONS[name](key, 0, rng(), **PARAMETERS[name](1))


@every_partition
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_small_data_gives_a_partition_or_an_error_with_what_to_do(name, data):
    key = np.array(data.draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=40)), dtype=np.int64)
    clients = data.draw(st.integers(1, 6))
    number = data.draw(st.integers(1, 4))
    parameters = {
        "pathological": {"classes_per_client": number},
        "dirichlet": {"beta": 0.3, "min_samples": number, "max_tries": 30},
        "exdir": {"classes_per_client": number, "alpha": 0.3, "min_samples": 1, "max_tries": 30},
        "nway_kshot": {"n": number, "k": 2, "stdev": 1, "noise": 1},
        "lognormal": {"classes_per_client": number, "sigma": 3.0, "min_samples": number},
        "iid": {"balanced": number > 2},
        "writers": {"min_samples": number},
    }[name]
    try:
        parts = PARTITIONS[name](key, clients, rng(), **parameters)
    except DataError as error:
        assert any(advice in str(error) for advice in ("lower ", "raise ", "allowed are "))
        return
    assert len(parts) == clients and is_well_formed(parts, len(key))
    given = np.concatenate(parts)
    if name not in INCOMPLETE:
        assert len(np.unique(given)) == len(given)
        assert len(given) == len(key) or name == "writers"


@every_partition
def test_the_signature_declares_types_ranges_and_descriptions(name):
    """So a new partition cannot be registered without what validation and the schema need."""
    first, *_ = inspect.signature(PARTITIONS[name]).parameters
    assert first in ("labels", "writers")
    parameters = dict(partition_model(name).model_fields)
    assert "clients" in parameters
    for key, field in parameters.items():
        types = (int, float, bool, int | None) if key == "clients" else (int, float, bool)
        assert (field.annotation in types or get_origin(field.annotation) is Literal) and field.description, key
    assert (inspect.getdoc(PARTITIONS[name]) or "").split("\n")[0].endswith(".")

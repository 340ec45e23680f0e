"""The code from outside the package that a run depends on: its hashes, recorded and compared."""

import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from pflmpi import outside
from pflmpi.algorithms import ALGORITHMS
from pflmpi.algorithms.base import Algorithm
from pflmpi.config.load import Config
from pflmpi.config.sections import differing
from pflmpi.data.partitions import PARTITIONS
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import OwnSource
from pflmpi.data.task_kinds import TASK_KINDS, TaskKind
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.measures import MEASURES
from pflmpi.learning.participation import SELECTIONS, is_trace
from pflmpi.learning.transforms import TRANSFORMS
from pflmpi.models import MODELS, Model
from pflmpi.registry import Registry, unknown
from pflmpi.store.module_file import sha256

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm": ALGORITHMS,
    "data": SOURCES,
    "model": MODELS,
    "partition": PARTITIONS,
    "selection": SELECTIONS,
    "transform": TRANSFORMS,
    "measure": MEASURES,
    "task": TASK_KINDS,
}
_LISTS = (  # place, section, key
    ("transform", "data", "transform"),
    ("measure", "evaluation", "measures"),
    ("selection", "training", "selection"),  # of one
)


def code_hashes(config: Config) -> dict[str, str]:
    """SHA-256 (hex) of the code and the trace from outside, by the section that names it ("model/1": the second)."""
    hashes = {}
    for place, name in _names(config.resolved()):
        reference = REGISTRIES[place.partition("/")[0]].reference(name)
        if reference is not None:
            hashes[place] = outside.code_hash(reference)
        elif place == "selection/0" and is_trace(name):
            hashes[place] = sha256(name)
    return hashes


def changes(
    run: Path, recorded: Mapping[str, str], values: Mapping[str, Any], config: Config, allowed: bool
) -> list[str]:
    """The sections that name what a run named, whose hash has changed since that was written, one text for each.

    Args:
        recorded: the hashes of then, as `code_hashes` gives them.
        values: the raw configuration of then.

    Raises:
        CheckpointError: there is such a change, and it is not allowed.
    """
    names = dict(_names(renamed(values, config)))
    hashes = {name: recorded.get(place) for place, name in names.items()}
    both = {place: name for place, name in _names(config.resolved()) if name in hashes}
    before = {place: digest for place, name in both.items() if (digest := hashes[name])}
    now = {place: digest for place, digest in code_hashes(config).items() if place in both}
    changed = [
        f"the code of {place} has changed since {run} was written (hash {str(old)[:12]} then, {new or 'none':.12} now)"
        for place, (old, new) in differing(before, now).items()
    ]
    if changed and not allowed:
        raise CheckpointError(
            f"{'; '.join(changed)}; put the old code back, go on with the changed code by --changed-code, or start a "
            "new run"
        )
    return changed


def renamed(values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Raw configuration of a run with the files of `config` for objects of the same name: a file may be moved."""
    now = dict(_names(config.resolved()))

    def of(place: str, section: Any) -> Any:
        if isinstance(section, list):
            return [of(f"{place}/{number}" if number else place, item) for number, item in enumerate(section)]
        if isinstance(section, Mapping) and place in now and _same_object(str(section.get("name")), now[place]):
            section = {**section, "name": now[place]}
        if place == "data" and "task" in section:
            section = {**section, "task": moved("task", section["task"])}
        for kind, of_section, key in _LISTS:
            if place == of_section and key in section:
                names, one = section[key], isinstance(section[key], str)
                files = [moved(f"{kind}/{n}", name) for n, name in enumerate([names] if one else names)]
                section = {**section, key: files[0] if one else files}
        return section

    def moved(place: str, name: str) -> str:
        other = now.get(place, name)
        return other if _same_object(name, other) else name

    return {key: of(key, value) for key, value in values.items()}


def named(name: str) -> list[tuple[str, str, Any]]:
    """Everything that a configuration can name so: section, name, object. A file is relative to the working directory.

    Raises:
        ConfigError: there is nothing of that name.
    """
    name = outside.located(name, Path())
    if not outside.is_reference(name):
        registries = {section: registry for section, registry in REGISTRIES.items() if name in list(registry)}
        if not registries:
            raise ConfigError(unknown("name", name, [*chain(*REGISTRIES.values())], near=3))
        return [(section, name, registry[name]) for section, registry in registries.items()]
    kind = outside.load(name)
    section = _section(name, kind)
    return [(section, name, REGISTRIES[section][name])]


def _section(name: str, kind: object) -> str:
    """The section that names such a class or function."""
    if not isinstance(kind, type):
        names = [*inspect.signature(kind).parameters] if inspect.isfunction(kind) else []
        known = {"x key": "transform", "scores labels": "measure", "round count num_train rng": "selection"}
        return "partition" if {"clients", "rng"} <= {*names} else known.get(" ".join(names), "model")
    bases = (("algorithm", Algorithm), ("data", OwnSource), ("model", Model), ("model", nn.Module), ("task", TaskKind))
    for section, base in bases:
        if issubclass(kind, base):
            return section
    raise ConfigError(f"{name} is a subclass of none of Algorithm, OwnSource, Model, torch.nn.Module, TaskKind")


def _names(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Section and name of each object that a configuration names."""
    for kind, section, key in _LISTS:
        names = raw.get(section, {}).get(key, ())
        for number, name in enumerate([names] if isinstance(names, str) else names):
            yield f"{kind}/{number}", name
    yield "task", raw.get("data", {}).get("task", "classification")
    for key in ("algorithm", "data", "model", "partition"):
        sections = raw[key] if isinstance(raw[key], list) else [raw[key]]
        for number, section in enumerate(sections):
            saved = key in ("data", "partition") and section.get("path")
            if isinstance(section.get("name"), str) and not saved:
                yield f"{key}/{number}" if number else key, section["name"]


def _same_object(name: str, other: str) -> bool:
    """Whether two references may name one object, in a file that was moved or renamed; `changes` compares the code."""
    references = outside.is_reference(name) and outside.is_reference(other)
    return references and name.rpartition(":")[2] == other.rpartition(":")[2]

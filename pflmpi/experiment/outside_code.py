"""Hashes of the code and initial weights from outside the package that a run depends on, recorded and compared."""

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
from pflmpi.config.sections import find_differences
from pflmpi.data.partitions import PARTITIONS
from pflmpi.data.sources import SOURCES
from pflmpi.data.sources.base import OwnSource
from pflmpi.data.task_kinds import TASK_KINDS, TaskKind
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.learning.measures import MEASURES
from pflmpi.learning.participation import SELECTIONS, is_trace
from pflmpi.learning.transforms import TRANSFORMS
from pflmpi.models import MODELS, Model
from pflmpi.models.base import run_reference
from pflmpi.registry import Registry, format_unknown_name
from pflmpi.store import config_file
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
_WEIGHTS = "model.weights"
_LISTS = (  # place, section, key
    ("transform", "data", "transform"),
    ("measure", "evaluation", "measures"),
    ("selection", "training", "selection"),  # a single name
)


def code_hashes(config: Config) -> dict[str, str]:
    """Computes the SHA-256 (hex) of code, trace and weights from outside, by what names it ("model/1": second model).

    A run whose weights are taken has its id; what cannot be read has none.
    """
    hashes = {}
    for place, name in _find_names(config.resolved()):
        if is_weights(place):
            run = run_reference(name)
            if digest := sha256(name) if run is None else config_file.run_id(Path(run[0])):
                hashes[place] = digest
            continue
        reference = REGISTRIES[place.partition("/")[0]].reference(name)
        if reference is not None:
            hashes[place] = outside.code_hash(reference)
        elif place == "selection/0" and is_trace(name):
            hashes[place] = sha256(name)
    return hashes


def is_weights(place: str) -> bool:
    """Whether a place in `code_hashes` is that of the weights that a model starts with."""
    return place.partition("/")[0] == _WEIGHTS


def find_code_changes(
    run: Path, recorded: Mapping[str, str], values: Mapping[str, Any], config: Config, allowed: bool
) -> list[str]:
    """Describes each change of code, between a run and `config`, that both name.

    Weights are compared where both have a hash: a run of an earlier version has none, and resuming needs no run.

    Args:
        recorded: the hashes in the run, from `code_hashes`.
        values: the raw configuration of the run.

    Raises:
        CheckpointError: there is a change, and none is allowed.
    """
    names = dict(_find_names(use_moved_files(values, config)))
    hashes = {name: recorded.get(place) for place, name in names.items()}
    both = {place: name for place, name in _find_names(config.resolved()) if name in hashes}
    before = {place: digest for place, name in both.items() if (digest := hashes[name])}
    now = {place: digest for place, digest in code_hashes(config).items() if place in both}
    changed = [
        f"{_describe(place)} has changed since {run} was written (hash {str(old)[:12]} then, {new or 'none':.12} now)"
        for place, (old, new) in find_differences(before, now).items()
        if not is_weights(place) or (old and new)
    ]
    if changed and not allowed:
        raise CheckpointError(
            f"{'; '.join(changed)}; put the old files back, go on with the changed ones by --changed-code (in "
            "Python: changed_code=True), or start a new run"
        )
    return changed


def _describe(place: str) -> str:
    return f"what {place} names" if is_weights(place) else f"the code of {place}"


def use_moved_files(values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Returns the raw configuration of a run with the paths of `config` for its own code, which may have been moved."""
    names = dict(_find_names(config.resolved()))

    def move(place: str, name: str) -> str:
        new_name = names.get(place, name)
        return new_name if _same_object(name, new_name) else name

    def move_section(place: str, section: Any) -> Any:
        if isinstance(section, list):
            return [move_section(f"{place}/{number}" if number else place, item) for number, item in enumerate(section)]
        if isinstance(section, Mapping) and place in names and _same_object(str(section.get("name")), names[place]):
            section = {**section, "name": names[place]}
        if place == "data" and "task" in section:
            section = {**section, "task": move("task", section["task"])}
        for kind, section_name, key in _LISTS:
            if place != section_name or key not in section:
                continue
            if isinstance(section[key], str):
                moved: Any = move(f"{kind}/0", section[key])
            else:
                moved = [move(f"{kind}/{number}", name) for number, name in enumerate(section[key])]
            section = {**section, key: moved}
        return section

    return {key: move_section(key, value) for key, value in values.items()}


def find_named_objects(name: str) -> list[tuple[str, str, Any]]:
    """Finds what a configuration can name so: section, name, object. Files are relative to the working directory."""
    name = outside.make_absolute(name, Path())
    if not outside.is_reference(name):
        registries = {section: registry for section, registry in REGISTRIES.items() if name in list(registry)}
        if not registries:
            raise ConfigError(format_unknown_name("name", name, [*chain(*REGISTRIES.values())], near=3))
        return [(section, name, registry[name]) for section, registry in registries.items()]
    kind = outside.load(name)
    section = _section(name, kind)
    return [(section, name, REGISTRIES[section][name])]


def _section(name: str, kind: object) -> str:
    """Returns the section that names such a class or function."""
    if not isinstance(kind, type):
        names = tuple(inspect.signature(kind).parameters) if inspect.isfunction(kind) else ()
        if {"clients", "rng"} <= {*names}:
            return "partition"
        by_parameters = {
            ("x", "key"): "transform",
            ("scores", "labels"): "measure",
            ("round", "count", "num_train", "rng"): "selection",
        }
        return by_parameters.get(names, "model")
    bases = (("algorithm", Algorithm), ("data", OwnSource), ("model", Model), ("model", nn.Module), ("task", TaskKind))
    for section, base in bases:
        if issubclass(kind, base):
            return section
    raise ConfigError(f"{name} is a subclass of none of Algorithm, OwnSource, Model, torch.nn.Module, TaskKind")


def _find_names(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields place and name of each object that a configuration names."""
    for kind, section, key in _LISTS:
        names = raw.get(section, {}).get(key, ())
        for number, name in enumerate([names] if isinstance(names, str) else names):
            yield f"{kind}/{number}", name
    yield "task", raw.get("data", {}).get("task", "classification")
    for key in ("algorithm", "data", "model", "partition"):
        sections = raw[key] if isinstance(raw[key], list) else [raw[key]]
        for number, section in enumerate(sections):
            has_path = key in ("data", "partition") and section.get("path")
            if isinstance(section.get("name"), str) and not has_path:
                yield f"{key}/{number}" if number else key, section["name"]
            if key == "model" and isinstance(section.get("weights"), str):
                yield f"{_WEIGHTS}/{number}" if number else _WEIGHTS, section["weights"]


def _same_object(name: str, other: str) -> bool:
    """Whether two references may name one object in a moved or renamed file; `find_code_changes` compares the code."""
    are_references = outside.is_reference(name) and outside.is_reference(other)
    return are_references and name.rpartition(":")[2] == other.rpartition(":")[2]

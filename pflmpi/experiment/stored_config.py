"""RUN/config.yaml: what a run was started with, and what may change when it is resumed."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pflmpi
from pflmpi import outside, tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.config import stored, yaml_file
from pflmpi.config.load import Config, parse
from pflmpi.config.sections import by_key, find_differences, override
from pflmpi.data.class_names import CLASS_NAMES
from pflmpi.errors import CheckpointError
from pflmpi.experiment.build import Experiment
from pflmpi.experiment.outside_code import find_code_changes, is_weights, use_moved_files
from pflmpi.learning import diagnostics, personal
from pflmpi.learning.personal import NotAModel, Personal
from pflmpi.learning.task import HOST, Task
from pflmpi.messages.packing import to_numpy
from pflmpi.models.built_module import are_equal, read_state_dict
from pflmpi.models.torch_module import ModuleArchitecture
from pflmpi.module_names import module_names
from pflmpi.runtime.config import list_free_keys
from pflmpi.store import config_file, module_file, partition_file, run_folder
from pflmpi.store.module_file import CONSTANT, FROM_FILE, Entries, WeightsFile
from pflmpi.transports.base import Transport

_log = logging.getLogger(__name__)
_AND = " + "  # between the models of devices


def recorded(experiment: Experiment, transport: Transport, run_id: str, code: Mapping[str, str]) -> dict[str, Any]:
    """Returns the section `recorded` of config.yaml: id, hashes of data and code, devices and versions."""
    return {
        "run": run_id,
        "data": experiment.federation.dataset.digest,
        "partition": experiment.division.digest,
        "partition_csv": partition_file.checksum(experiment.counts),
        "device": _AND.join(experiment.computed_on),
        "ranks": transport.size,
        "transport": transport.name,
        **({"code": dict(code)} if code else {}),
        **({"frozen": digest} if (digest := experiment.frozen_digest) else {}),
        **({"unseen": numbers} if (numbers := experiment.division.unseen_numbers) else {}),
        "versions": {"pflmpi": pflmpi.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def write(run: Path, experiment: Experiment, recorded: Mapping[str, Any]) -> None:
    """Write the files of a run besides its rounds, config.yaml last."""
    write_about_data(run, experiment)
    write_config(run, experiment, recorded)


def write_about_data(run: Path, experiment: Experiment) -> None:
    partition_file.write(run, experiment.counts)
    module_file.write(run, {number: _entries(experiment, number) for number in _modules(experiment)})


def write_config(run: Path, experiment: Experiment, recorded: Mapping[str, Any]) -> None:
    config_file.write(run, yaml_file.dump({**experiment.config.resolved(), "recorded": recorded}))


def attributes(experiment: Experiment, recorded: Mapping[str, Any]) -> dict[str, str | int]:
    """Returns the attributes of every round file: configuration, hashes, versions, and how to read the state."""
    algorithm, task, resolved = experiment.config.algorithm, experiment.tasks[0], experiment.config.resolved()
    values = {
        "config": yaml_file.dump(resolved),
        **recorded,
        "algorithm": resolved["algorithm"]["name"],
        "algorithm_class": f"{type(algorithm).__module__}:{type(algorithm).__qualname__}",
        "summary": algorithm.summary,
        "paper": algorithm.paper,
        "personal": personal.to_json(_describe_personal(algorithm, task)),
        "class_names": list(class_names(experiment)),
        **({"client_names": list(names)} if (names := experiment.federation.client_names) else {}),
        "diagnostics": diagnostics.to_json(algorithm.diagnostics(task)),
        **({"modules": len(modules)} if (modules := _modules(experiment)) else {}),  # those in modules.h5
    }
    return {key: value if isinstance(value, str | int) else json.dumps(value) for key, value in values.items()}


def _describe_personal(algorithm: Algorithm, task: Task) -> Personal:
    """Returns how the model of a client is put together from a checkpoint, which has it as it is before `adapt`."""
    expression, kind = algorithm.personal(task), type(algorithm)
    if kind.adapt is Algorithm.adapt or kind.predict is not Algorithm.predict or isinstance(expression, NotAModel):
        return expression
    return NotAModel("a model that it adapts before a test", nearest=expression)


def _modules(experiment: Experiment) -> list[int]:
    """Returns the numbers of the models that modules.h5 is needed for: modules from outside, and frozen parts."""
    tasks = [experiment.tasks[cohort] for cohort in experiment.cohort[: len(experiment.config.models)]]
    return [
        number
        for number, task in enumerate(tasks)
        if isinstance(task.architecture, ModuleArchitecture) or task.frozen.paths
    ]


def _entries(experiment: Experiment, number: int) -> Entries:
    task = experiment.tasks[experiment.cohort[number]]
    frozen, file = dict(tree.leaves(task.frozen.on(HOST))), None
    if isinstance(task.architecture, ModuleArchitecture):
        paths, constants = task.architecture.state_dict_entries
        file = task.architecture.recipe.weights
    else:
        whole = [path for path, _ in tree.leaves(task.whole(task.like()))]
        paths, constants = {name: path for path, name in module_names(whole).items()}, {}
    in_file = read_state_dict(Path(file)) if file is not None and frozen else {}
    for name, path in list(paths.items()):
        if path in frozen and name in in_file and are_equal(in_file[name], frozen[path]):
            paths[name] = FROM_FILE
        elif path in frozen:
            paths[name], constants[name] = CONSTANT, frozen[path]
    weights = WeightsFile(file, module_file.sha256(file)) if file and FROM_FILE in paths.values() else None
    arrays = {
        name: to_numpy(value.float() if value.dtype == torch.bfloat16 else value) for name, value in constants.items()
    }
    return Entries(paths, arrays, weights)


def class_names(experiment: Experiment) -> tuple[str, ...]:
    """Returns the names of the classes: in the data or else its labels, or those of a dataset of the package."""
    data, dataset = experiment.config.data, experiment.federation.dataset
    if not dataset.task_kind.classes:
        return ("all samples",)
    return dataset.own_class_names or (CLASS_NAMES.get(data.name, ()) if data.path is None else ())


def stored_config(run: Path, overrides: Sequence[str]) -> Config:
    """Reads the configuration of a run, with overrides.

    Raises:
        CheckpointError: not a run, or an override that would change its results; `training.rounds` may grow, and where
            and how things are computed may change.
    """
    return checked_config(run, override(values(run), overrides))


def checked_config(run: Path, changed: Mapping[str, Any]) -> Config:
    """Returns the configuration with these sections; raises as `stored_config`."""
    config, changes = change_config(run, changed)
    _check_changes(run, changes, config)
    return config


def change_config(run: Path, changed: Mapping[str, Any]) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """Returns the configuration with these sections, and its differences from a run: (before, now) by dotted key."""
    config = _parse(run, changed)
    return config, _differences(_parse_moved(run, values(run), config), config)


def resume_config(run: Path, config: Config) -> Config:
    """Returns the configuration of a run with the changes that `config` makes; raises as `allowed_changes`."""
    sections = use_moved_files(values(run), config)
    for key, value in allowed_changes(run, config).items():
        section, _, name = key.partition(".")
        sections[section] = {**sections[section], name: value}
    return _parse(run, sections)


def allowed_changes(run: Path, config: Config) -> dict[str, Any]:
    """Returns the new values, by dotted key, that change when a run is resumed with this configuration.

    Raises:
        CheckpointError: one of them would change the results of the run.
    """
    differences = _differences(_parse_moved(run, values(run), config), config)
    executor: str = config.runtime.executor
    if executor == "auto":  # the run has recorded what was chosen
        executor, _ = differences.pop("runtime.executor", (executor, executor))
    if config.data.split == "auto":  # a run from before that default keeps its own
        differences.pop("data.split", None)
    if config.runtime.lanes is None or executor == "loop":
        differences.pop("runtime.lanes", None)
    _check_changes(run, differences, config)
    return {key: new for key, (_, new) in differences.items()}


def check_round(run: Path, round: int, config: Config) -> None:
    """Raise `CheckpointError` unless config.yaml is the one that a round was written with.

    Args:
        config: says where files that the run names are now.
    """
    written = yaml_file.parse_stored(str(run_folder.read_attributes(run, round)["config"]), "")
    differences = _differences(_parse_moved(run, written, config), _parse_moved(run, values(run), config))
    if changed := _format_fixed(differences, config):
        raise CheckpointError(
            f"{config_file.path(run)} is not the one that round {round} was written with: {', '.join(changed)}; put it "
            "back from a copy, or set these values back"
        )
    if problem := config_file.find_damage(run):
        raise CheckpointError(problem)


def read_origin(run: Path) -> dict[str, Any]:
    """Returns what a resumed run keeps of its records: the run that it is a fork of, and why it has no epsilon."""
    return {key: value for key, value in stored.read(run)["recorded"].items() if key in ("fork", "no_epsilon")}


def resumed_code(run: Path, experiment: Experiment) -> dict[str, str]:
    """Returns the hashes that a resumed run or a fork records: of the code of now, and of the weights it began with."""
    weights = {place: digest for place, digest in _read_code(run).items() if is_weights(place)}
    return {place: digest for place, digest in experiment.code.items() if not is_weights(place)} | weights


def _read_code(run: Path) -> dict[str, str]:
    code: dict[str, str] = stored.read(run)["recorded"].get("code", {})
    return code


def devices_so_far(run: Path, experiment: Experiment) -> tuple[str, ...]:
    """Returns the models of the devices that have computed a run and of those that will continue it."""
    before = tuple(str(stored.read(run)["recorded"].get("device", _AND.join(experiment.computed_on))).split(_AND))
    new = [model for model in experiment.computed_on if model not in before]
    if new and experiment.config.runtime.mixed_gpus == "refuse":
        raise CheckpointError(
            f"{run} was computed on {_AND.join(before)}, and would be continued on {_AND.join(new)}, where the same "
            "numbers may come out differently; continue it where it began, or add -s runtime.mixed_gpus=allow, which "
            "the run records"
        )
    return (*before, *new)


def find_changed_code(run: Path, config: Config, allowed: bool) -> list[str]:
    """Lists changes of code from outside the package since a run was written; raises unless they are allowed."""
    return find_code_changes(run, _read_code(run), values(run), config, allowed)


def _parse_moved(run: Path, values: Mapping[str, Any], config: Config) -> Config:
    """Parses the configuration of a run, whose files may have been moved to where `config` has them."""
    return _parse(run, use_moved_files(values, config))


def _parse(run: Path, values: Mapping[str, Any]) -> Config:
    """Parses the configuration of a run; first logs which code it executes: a stranger's code may do anything."""
    sections = [part for value in values.values() for part in (value if isinstance(value, list) else [value])]
    names = [name for part in sections if isinstance(part, Mapping) for name in _code_names(part)]
    announce(run, [name for name in names if isinstance(name, str)])
    return parse(values)


def announce(run: Path, names: Sequence[str]) -> None:
    """Log which names in the configuration of a run are code from outside the package, which is executed now."""
    if code := dict.fromkeys(name for name in names if outside.is_reference(name)):
        _log_once(f"{run} names code, which is executed now: {', '.join(code)}")


def _code_names(section: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a section that may name code from outside."""
    lists = [names for key in ("transform", "measures") if isinstance(names := section.get(key), list)]
    return [*map(section.get, ("name", "task", "selection")), *(name for names in lists for name in names)]


@cache  # forked ranks inherit it
def _log_once(text: str) -> None:
    _log.warning("%s", text)


def values(run: Path) -> dict[str, Any]:
    return {key: value for key, value in stored.read(run).items() if key != "recorded"}


def _differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the values before and now, by dotted key, in which two configurations differ."""
    return find_differences(by_key(before.resolved()), by_key(now.resolved()))


def _check_changes(run: Path, differences: Mapping[str, tuple[Any, Any]], config: Config) -> None:
    if changed := _format_fixed(differences, config):
        raise CheckpointError(
            f"{run} was made with another configuration: {', '.join(changed)}; "
            "leave these as they are, or start a new run"
        )


def _format_fixed(differences: Mapping[str, tuple[Any, Any]], config: Config) -> list[str]:
    """Formats the differences that would change results."""
    free = list_free_keys(config.training.schedule, config.training.decay_rounds)
    return [f"{key} = {old!r} in the run, {new!r} now" for key, (old, new) in differences.items() if key not in free]

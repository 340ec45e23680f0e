"""Reopens a run on disk: its newest good checkpoint, its state after a round, its data as recorded."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pflmpi import outside, tree
from pflmpi.atomic import remedy
from pflmpi.config.load import Config
from pflmpi.data.federation import Federation
from pflmpi.data.unseen import Division
from pflmpi.errors import CheckpointError, DataError
from pflmpi.experiment import stored_config
from pflmpi.experiment.build import Experiment, build_experiment, divide, load_federation
from pflmpi.experiment.recorded_data import check_hash
from pflmpi.learning.task import HOST
from pflmpi.messages.downlink import KeptRows
from pflmpi.runtime.client_state import Population, allocate, find_row_types, tree_from_arrays
from pflmpi.runtime.devices import choose_device, fix_kernels
from pflmpi.runtime.faults import all_or_none
from pflmpi.runtime.setup import Setup
from pflmpi.store import config_file, metrics_file, partition_file, pruning, run_folder, verify
from pflmpi.store.layout import Layout
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

_log = logging.getLogger(__name__)


def continue_after(run: Path, experiment: Experiment, recorded: Mapping[str, Any]) -> str:
    """Find the round to continue after, and write the configuration to continue with; returns the round."""
    done, rounds = _find_newest_matching(run, experiment), experiment.config.training.rounds
    if rounds < done:
        raise CheckpointError(
            f"training.rounds = {rounds}, but {run} has reached round {done}; give more, or start a new run"
        )
    _log_other_class_names(run, done, json.dumps(list(stored_config.class_names(experiment))))
    if rounds == done:
        print(f"pflmpi: nothing is left to do: {run} has reached round {done} of {rounds}", flush=True)
    with continuing(run):
        if rounds > done or not config_file.path(run).exists():
            stored_config.write(run, experiment, recorded)
        else:
            partition_file.write(run, experiment.counts)
    return str(done)


def _log_other_class_names(run: Path, round: int, names: str) -> None:
    """Warn where the names of the classes (JSON) differ from those in a checkpoint, if it has any."""
    before = run_folder.read_attributes(run, round).get("class_names", names)
    if before not in (names, "[]"):
        _log.warning("the names of the classes are now %s; up to round %d they are %s", names, round, before)


def _find_newest_matching(run: Path, experiment: Experiment) -> int:
    """Returns the newest good round of a run, and prints the damaged ones that it skips."""
    done, problems = verify.find_newest_good(run)
    for problem in problems:
        print(f"pflmpi: passed over a damaged checkpoint: {problem}", flush=True)
    stored_config.check_round(run, done, experiment.config)
    if difference := array_difference(run, done, experiment, "those of this pflmpi"):
        raise CheckpointError(
            f"{run} cannot be continued: its {difference}; continue it with the version that wrote it, or start a "
            "new run"
        )
    return done


def array_difference(run: Path, round: int, experiment: Experiment, now: str) -> str:
    """Returns whose arrays in a round on disk differ from those of an experiment, named `now`; "" if none do."""
    if path := differing_client_array(run, round, experiment.templates):
        return f"clients keep other arrays than {now}, such as {path}"
    if path := _differing_server_array(run, round, experiment):
        return f"server keeps other arrays than {now}, such as {path}"
    return ""


def differing_client_array(run: Path, round: int, templates: Sequence[Tree]) -> str | None:
    """Returns the path of an array that clients keep either on disk or here, or in another shape; None if all agree."""
    stored_kinds = run_folder.read_kinds(run, round)
    for cohort, kinds in find_row_types(templates).items():
        if path := _first_difference(kinds, stored_kinds.get(cohort, {})):
            return path
    return None


def _differing_server_array(run: Path, round: int, experiment: Experiment) -> str | None:
    """As `differing_client_array`, for the server."""
    initial = experiment.config.algorithm.init_server(experiment.tasks[0].replace(device=HOST))
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.leaves(initial)}
    return _first_difference(shapes, {path: array.shape for path, array in run_folder.read_server(run, round).items()})


def _first_difference(kinds: Mapping[str, object], others: Mapping[str, object]) -> str | None:
    return next((path for path in sorted(kinds.keys() | others.keys()) if kinds.get(path) != others.get(path)), None)


def restore(
    run: Path, setup: Setup, population: Population, transport: Transport, done: int, columns: Sequence[str]
) -> tuple[Tree, Layout]:
    """Read the state after a round, and delete later rounds; the server's is `{}` except on rank 0.

    Args:
        columns: of metrics.csv, if it has to be created.
    """

    def read() -> tuple[Tree, Layout]:
        hosted = setup.placement.hosted(transport.rank)
        for clients, arrays in run_folder.read_pieces(run, done, hosted):
            population.restore(clients, arrays)
        server = read_server(run, done) if transport.rank == 0 else {}
        return server, run_folder.read_layout(run, done)

    def delete_later() -> None:
        if transport.rank == 0:
            with continuing(run):
                if metrics_file.path(run).exists():
                    verify.check_metrics(run, done)
                elif done:
                    _log.warning(
                        "%s is missing; it begins anew without figures of rounds 1 to %d", metrics_file.path(run), done
                    )
                pruning.discard_after(run, done)
                metrics_file.restart(run, done, columns)

    state = all_or_none(transport, read)
    all_or_none(transport, delete_later)
    return state


@contextmanager
def continuing(run: Path) -> Iterator[None]:
    """Raise `CheckpointError` for a file of the run that cannot be written."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or run}: {error.strerror or error}"
        raise CheckpointError(f"{run} cannot be continued: {what}; {remedy(error)}") from error


def reopen(
    run: Path, overrides: Sequence[str], device: torch.device | None = None, *, changed_code: bool = False
) -> Experiment:
    """Reopens the experiment of a run, on the data that it was made with; for overrides see `stored_config`.

    Args:
        device: to compute on; None for this process's own, whose kernels are fixed as in the run.
        changed_code: whether code from outside the package may have changed.
    """
    config = stored_config.stored_config(run, overrides)
    if device is None:
        device = choose_device(config.runtime)
        fix_kernels(device, config.runtime, config.training)
    return rebuild(run, config, device, changed_code)


def rebuild(run: Path, config: Config, device: torch.device, changed_code: bool) -> Experiment:
    """Builds the experiment of a configuration on the data of a run."""
    stored_config.find_changed_code(run, config, changed_code)
    with outside.as_config_error():
        return on_recorded_data(run, build_experiment(config, _load_data(run, config), device))


def on_recorded_data(run: Path, experiment: Experiment) -> Experiment:
    """Returns the experiment with the recorded means and deviations, whose last digits depend on the NumPy version.

    Raises:
        CheckpointError: data, partition or frozen weights are not those that the run was made with.
    """
    _check_recorded(run, experiment.division)
    frozen = " ".join(["frozen part of the model", *experiment.weights, "has"])
    check_hash(run, "frozen", frozen, experiment.frozen_digest)
    normalisation = {name: tuple(values.tolist()) for name, values in _read_normalisation(run).items()}
    return replace(experiment, tasks=tuple(task.replace(**normalisation) for task in experiment.tasks))


def reopen_data(run: Path, config: Config) -> Division:
    """Reopens the clients' data of a run; its code may have changed, as long as it gives the recorded data."""
    with outside.as_config_error():
        division = divide(config, _load_data(run, config))
    _check_recorded(run, division)
    return division


def _load_data(run: Path, config: Config) -> Federation:
    """Loads the data of a run; raises `DataError` that says how to name files that have moved."""
    for section, path in (("data", config.data.path), ("partition", config.partition.path)):
        if path is not None and not Path(path).exists():
            raise DataError(
                f"{section}.path = {path!r} of {run} does not exist; put it back, or name its new place: "
                f"-s {section}.path=FILE, in Python open_run(RUN, {section}={{'path': FILE}})"
            )
    return load_federation(config)


def _check_recorded(run: Path, division: Division) -> None:
    check_hash(run, "data", "data has", division.trained.dataset.digest)
    check_hash(run, "partition", "partition has", division.digest)


def _read_normalisation(run: Path) -> dict[str, np.ndarray]:
    """Reads mean and deviation from the newest readable round; all rounds have the same. {} if no round has them."""
    for round in reversed(run_folder.rounds(run)):
        with suppress(CheckpointError):
            return run_folder.read_section(run, round, "normalisation")
    return {}


def read_server(run: Path, round: int) -> Tree:
    return tree_from_arrays(run_folder.read_server(run, round))


def read_population(ready: Setup, run: Path, round: int, clients: np.ndarray) -> Population:
    """Reads the state of some clients [m], ascending."""
    population = allocate(ready.executor.cohort, clients, ready.templates)
    for piece, arrays in run_folder.read_pieces(run, round, clients):
        population.restore(piece, arrays)
    return population


def read_kept(ready: Setup, run: Path, round: int) -> KeptRows:
    """Returns a function that reads the rows that clients keep for others; see `Homes`."""
    return lambda name, like, clients: read_population(ready, run, round, clients).kept(name, like, clients)

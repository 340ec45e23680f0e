"""Tests the clients of a run again, from a checkpoint: on their own samples, or on other data."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from pflmpi.config.load import partition
from pflmpi.data import load
from pflmpi.data.class_names import CLASS_NAMES
from pflmpi.data.config import DataConfig
from pflmpi.data.csv_table import NoClientColumnError
from pflmpi.data.dataset import Dataset
from pflmpi.data.federation import Federation, build
from pflmpi.data.own_files import is_table, may_hold_arrays
from pflmpi.data.sources import SOURCES
from pflmpi.data.unseen import Division
from pflmpi.errors import CheckpointError, ConfigError, DataError
from pflmpi.experiment import restore
from pflmpi.experiment.build import Experiment, setup
from pflmpi.experiment.training_checks import check_newcomer_rate, check_rate
from pflmpi.learning.measures import Measure
from pflmpi.machine import expand_path
from pflmpi.messages.downlink import Homes, Reply, send_down
from pflmpi.messages.kinds import Messages, Own, OwnClasses
from pflmpi.runtime.contract import calling
from pflmpi.runtime.counts import Counts, sort_by_client
from pflmpi.runtime.evaluation import evaluate, evaluate_trained
from pflmpi.runtime.rounds import train
from pflmpi.runtime.setup import Setup
from pflmpi.runtime.unseen import evaluate_unseen, mean_answers
from pflmpi.text import join_truncated
from pflmpi.transports.inprocess import InProcessTransport

logger = logging.getLogger(__name__)

Split = Literal["test", "validation", "train"]
Update = Callable[[int, int], None]
_ALONE = InProcessTransport()
_ONE_NEW_CLIENT = {"name": "iid", "clients": 1}  # partitions of other data for unseen clients
_EARLIER = "choose an earlier --round"
_NEW_CLIENT_PER_WRITER = {"name": "writers", "clients": None}
_TEST_ON_ALL = "; leave out whose samples they are, to test every client on all"


def confusion(experiment: Experiment, run: Path, round: int, update: Update) -> np.ndarray | None:
    """Counts the test samples of all clients by true and predicted class, [K, K] int64; None without classes."""
    dataset = experiment.federation.dataset
    if not dataset.task_kind.classes:
        return None
    samples = np.zeros((dataset.num_classes, dataset.num_classes), np.int64)

    def count(scores: np.ndarray, labels: np.ndarray) -> float:
        np.add.at(samples, (labels, scores.argmax(1)), 1)
        return 0.0

    count_trained(experiment, run, round, update, measures={"confusion": count})
    return samples


def count_trained(
    experiment: Experiment,
    run: Path,
    round: int,
    update: Update,
    after_training: bool = False,
    measures: Mapping[str, Measure] | None = None,
) -> Counts:
    """Test the trained clients of a run with the state of a checkpoint, exactly as the run tests them.

    Args:
        experiment: of the run, or with other test samples, see `replace_test_samples`.
        update: called with the number of groups of clients that are done, and of all.
        after_training: whether to train each client as in the next round before it is tested.
        measures: in place of those of the run.
    """
    ready = setup(experiment, 1, 1)
    if measures is not None:
        ready = replace(ready, executor=replace(ready.executor, measures=measures))
    clients = np.arange(ready.task.num_clients)
    if after_training:
        _check_answers(ready, run, round)
        decay, who = ready.executor.decay(clients, round + 1).min(), f"--after-training: after round {round} clients"
        check_rate(ready.task.training, decay, who, round + 1, _EARLIER)
    groups, counts = ready.placement.assign(clients)[0], []
    kinds = [ready.declared.down[name] for name in ready.algorithm.predicts_with]
    needs_own = after_training or any(isinstance(kind, Own | OwnClasses) for kind in kinds)
    receivers = clients if needs_own else clients[:0]
    reply = _publish(ready, run, round, receivers)
    for done, group in enumerate(groups, 1):  # a group at a time: all clients may not fit into memory
        population = restore.read_population(ready, run, round, group)
        if after_training:
            ups = train(ready.executor, population, reply, [group], round + 1).ups
            counts.append(evaluate_trained(ready.executor, population, reply, ups, round + 1))
        else:
            counts.append(evaluate(ready.executor, population, reply, [group], round))
        update(done, len(groups))
    return sort_by_client(groups, counts, ready.executor.untested([]))


def count_unseen(experiment: Experiment, run: Path, round: int) -> Counts:
    """Test unseen clients that join after a round."""
    ready = setup(experiment.with_run_weights(), 1, 1)  # with which newcomers begin
    if ready.unseen is None:
        why = getattr(experiment.newcomer, "why", f"{run} has kept none out of training; give new ones with --data")
        raise ConfigError(f"there are no unseen clients to test: {why}")
    if ready.unseen.updates:
        check_newcomer_rate(ready.task.training, round, ready.unseen.updates, "--unseen", _EARLIER)
    shared, kept = compute_newcomer_messages(ready, run, round), restore.read_kept(ready, run, round)
    return evaluate_unseen(ready.unseen, _ALONE, restore.read_server(run, round), shared, kept, round)


def compute_newcomer_messages(ready: Setup, run: Path, round: int) -> Messages:
    """Computes the messages that are the same for all newcomers after a round of a run."""
    assert ready.unseen is not None
    shared = _publish(ready, run, round, np.empty(0, np.int64)).shared
    if not ready.declared.answers:
        return shared
    _check_answers(ready, run, round)
    population = restore.read_population(ready, run, round, ready.placement.hosted(0))
    return {**shared, **mean_answers(ready.unseen, _ALONE, population)}


def replace_test_samples(experiment: Experiment, split: Split, other: Dataset | None, unseen: bool) -> Experiment:
    """Returns the experiment with other test samples for its trained or its unseen clients.

    Args:
        split: which samples to test on: those of the run's clients, or of the unseen clients in `other`.
        other: data besides the run's. Trained clients are tested on their samples in it if it says whose they are, and
            on all of it otherwise. The unseen clients are the clients in it, or all of it is one client.
        unseen: whether unseen clients are tested.
    """
    division = experiment.division
    if other is None:
        return replace(experiment, division=_choose_split(division, split))
    if experiment.config.data.normalize == "pixel":
        raise ConfigError(
            f"--data {other.name}: with data.normalize: pixel samples are less the mean of all data of the run, which "
            "other data cannot be; test the run's own samples, or choose standard for a new run"
        )
    other = _match(division.trained.dataset, other)
    dataset, offset = _join(division.trained.dataset, other), len(division.trained.dataset.labels)
    if not unseen:
        tests = [samples + offset for samples in _samples_of_clients(other, division)]
        trained = replace(division.trained, dataset=dataset, test=tuple(tests))
        return replace(experiment, division=Division(trained, trained, np.arange(len(tests))))
    clients = partition(_ONE_NEW_CLIENT if other.writers is None else _NEW_CLIENT_PER_WRITER)
    new = build(other, clients, experiment.config.data, 0)
    trained = replace(division.trained, dataset=dataset)
    everyone = Federation(
        dataset,
        train=(*trained.train, *(samples + offset for samples in new.train)),
        test=(*trained.test, *(samples + offset for samples in new.test)),
        digest=new.digest,
        class_counts=np.concatenate([trained.class_counts, new.class_counts]),
    )
    whole = Division(trained, everyone, np.arange(everyone.num_clients))
    return replace(experiment, division=_choose_split(whole, split))


def with_updates(experiment: Experiment, updates: int) -> Experiment:
    """Returns the experiment with another number of local updates of unseen clients."""
    evaluation = experiment.config.evaluation.model_copy(update={"unseen_updates": updates})
    return replace(experiment, config=replace(experiment.config, evaluation=evaluation))


def _check_answers(ready: Setup, run: Path, round: int) -> None:
    """Raise `CheckpointError` where clients keep answers of the server, and the checkpoint has other arrays."""
    if ready.declared.answers and (path := restore.differing_client_array(run, round, ready.templates)):
        raise CheckpointError(
            f"{run} is of an earlier pflmpi, whose clients keep other arrays, such as {path}; test its clients after "
            "training, or new ones, with the version that wrote it"
        )


def _publish(ready: Setup, run: Path, round: int, receivers: np.ndarray) -> Reply:
    """Computes what the server of a checkpoint sends to all clients, and to each of the receivers."""
    with calling(ready.algorithm, "publish", round):
        published = ready.algorithm.publish(ready.task, restore.read_server(run, round), receivers)
    homes = Homes(ready.placement.home, restore.read_kept(ready, run, round))
    return send_down(_ALONE, ready.declared, published, [[receivers]], homes=homes).on(ready.executor.device)


def _choose_split(division: Division, split: Split) -> Division:
    """Returns the division with the samples of a split in place of the test samples."""
    if split == "test":
        return division
    if split == "validation" and not division.trained.validation:
        raise ConfigError("--split validation: the run has no validation samples (data.validation); choose test")
    trained, everyone = (
        replace(federation, test=federation.train if split == "train" else federation.validation)
        for federation in (division.trained, division.everyone)
    )
    return replace(division, trained=trained, everyone=everyone)


def read_other_data(text: str, config: DataConfig) -> Dataset:
    """Reads the data that a user names: a file or folder, or a known dataset."""
    path = expand_path(text)
    if path.exists() or text not in list(SOURCES):
        changes: dict[str, str | None] = {"path": str(path), "name": Path(text).stem, "limit": None}
        changes |= {} if may_hold_arrays(path) else {"layout": None}
        changes |= {} if is_table(path) else {"label": None, "client": None}
        section = config.model_copy(update=changes)
    else:
        section = DataConfig(name=text, root=config.root, task=config.task)
    try:
        return load(section, 0)
    except DataError as error:
        if not isinstance(error.__cause__, NoClientColumnError):
            raise
    logger.warning("--data %s has no column %r (data.client), which says whose samples they are", text, section.client)
    return load(section.model_copy(update={"client": None}), 0)


def _match(first: Dataset, other: Dataset) -> Dataset:
    """Returns other data with the labels, columns and characters of the first; it may lack some classes."""
    images = _matching_images(first, other)
    kind, other_kind = (f"{samples.dtype} {list(samples.shape[1:])}" for samples in (first.images, images))
    if kind != other_kind:
        raise ConfigError(
            f"--data {other.name} has samples of {other_kind}, the run {kind}; give data of the same kind"
        )
    if first.task_kind.classes:
        labels = _matching_labels(first, other)[other.labels]
    elif (labels := other.labels).shape[1:] != first.labels.shape[1:] or other.num_classes > first.num_classes:
        shapes = f"{list(labels.shape[1:])} with {other.num_classes} outputs, the run {list(first.labels.shape[1:])}"
        raise ConfigError(
            f"--data {other.name} has labels {shapes} with {first.num_classes}; give data of the same kind"
        )
    elif first.class_names and other.class_names:
        labels = first.task_kind.reorder(labels, _match_names(other, first.class_names, other.class_names))
    return replace(other, images=images, labels=labels, num_classes=first.num_classes)


def _join(first: Dataset, other: Dataset) -> Dataset:
    """Concatenates two matching datasets, with the normalisation of the first."""
    return replace(
        first,
        images=np.concatenate([first.images, other.images]),
        labels=np.concatenate([first.labels, other.labels]),
        official_test=np.concatenate([first.official_test, other.official_test]),
        official_validation=None,
        writers=None,
    )


def _samples_of_clients(other: Dataset, division: Division) -> list[np.ndarray]:
    """Returns the samples of each trained client in other data: all of them if it does not say whose they are.

    Clients that data with names lacks have no samples.
    """
    num_trained = division.trained.num_clients
    if other.writers is None:
        return [np.arange(len(other.labels))] * num_trained
    names, writers = _client_names(other, division), np.unique(other.writers).tolist()
    named = bool(other.written_clients)
    other_names = [*other.written_clients] if named else [str(number) for number in range(len(writers))]
    _refuse_others(other, "clients", names, other_names, may_lack=named, remedy=_TEST_ON_ALL)
    numbers = dict(zip(other_names, writers, strict=True))
    samples = [np.flatnonzero(other.writers == numbers.get(name, -1)) for name in names[:num_trained]]
    if not any(map(len, samples)):
        raise ConfigError(f"--data {other.name} has no samples of the trained clients{_TEST_ON_ALL}")
    return samples


def _client_names(other: Dataset, division: Division) -> list[str]:
    """Returns the names of the clients in the run's data, or else their numbers in the partition; unseen ones last."""
    dataset = division.trained.dataset
    if dataset.writers is None or not dataset.written_clients:
        return [str(number) for number in division.numbers]
    if not division.everyone.client_names:
        raise ConfigError(
            f"--data {other.name} says whose its samples are, and the clients of the run are not those of its own "
            f"data: its partition mixes them{_TEST_ON_ALL}"
        )
    return [*division.everyone.client_names]


def _matching_images(first: Dataset, other: Dataset) -> np.ndarray:
    """Returns the other's samples with columns in the first's order, or characters by its numbers, where both have."""
    if first.columns and other.columns and first.columns != other.columns:
        _refuse_others(other, "columns", first.columns, other.columns, may_lack=False)
        return np.ascontiguousarray(other.images[:, [other.columns.index(name) for name in first.columns]])
    if first.characters and other.characters and first.characters != other.characters:
        names, other_names = ([*map(repr, dataset.characters)] for dataset in (first, other))
        _refuse_others(other, "characters", names, other_names, may_lack=True)
        numbers = np.array([0, *(1 + first.characters.index(character) for character in other.characters)], np.float32)
        return numbers[other.images.astype(np.intp)]
    return other.images


def _matching_labels(first: Dataset, other: Dataset) -> np.ndarray:
    """Returns the label in the first of each class of the other, matched by name, or by label if one has no names."""
    classes, other_classes = _class_names(first), _class_names(other)
    if not (classes and other_classes):
        classes, other_classes = first.label_numbers, other.written_labels or other.label_numbers
    return _match_names(other, classes, other_classes)


def _match_names(other: Dataset, classes: Sequence[str], other_classes: Sequence[str]) -> np.ndarray:
    """Returns the place of each class of the other data in those of the run."""
    _refuse_others(other, "classes", classes, other_classes, may_lack=True)
    return np.array([classes.index(name) for name in other_classes])


def _class_names(dataset: Dataset) -> tuple[str, ...]:
    """Returns the names of the classes [K]; () if they have none."""
    if dataset.written_labels:  # of the user's own file, which may be called as a built-in dataset
        return dataset.class_names
    return dataset.class_names or CLASS_NAMES.get(dataset.name, ())


def _refuse_others(
    other: Dataset, what: str, names: Sequence[str], other_names: Sequence[str], *, may_lack: bool, remedy: str = ""
) -> None:
    """Raises `ConfigError` for names that the run does not have, or, unless it may lack some, the other data."""
    unknown = [name for name in other_names if name not in names]
    missing = [name for name in names if name not in other_names and not may_lack]
    if unknown or missing:
        raise ConfigError(
            f"--data {other.name} and the run differ in {what}: only one has {join_truncated(unknown or missing)}; "
            f"those of the run are {join_truncated(names)}{remedy}"
        )

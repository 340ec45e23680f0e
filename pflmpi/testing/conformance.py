"""Properties that every algorithm must have: checks of whole runs, and a test class to subclass for your own."""

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from pflmpi import outside, tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.analysis.bisection import differing_arrays
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError
from pflmpi.experiment import restore
from pflmpi.experiment.build import Experiment, prepare, setup
from pflmpi.experiment.evaluation import compute_newcomer_messages
from pflmpi.learning.replay import without_replay
from pflmpi.runtime.unseen import join_newcomers, receive_messages
from pflmpi.store import run_folder
from pflmpi.testing.quick_run import resume, run, settings
from pflmpi.text import join_truncated
from pflmpi.transports.inprocess import InProcessTransport

EXECUTORS = ("loop", "lanes")
_ROUNDING = 1e-5  # float32 sums in another order, over some twenty steps


@dataclass(frozen=True)
class Runs:
    """Cached runs of one experiment on different numbers of ranks."""

    sections: Mapping[str, Any]  # of the configuration, besides those of `quick_run.QUICK`
    folder: Path  # parent of the run folders
    _digests: dict[str, str] = field(default_factory=dict)

    def settings(self, **sections: Any) -> dict[str, Any]:
        base: dict[str, Any] = {"partition": {"clients": 9}, "evaluation": {"unseen": 0.2, "when": "both"}}  # 7 train
        if "optimizer" not in self.sections.get("training", {}):
            base["training"] = {"momentum": 0.5}
        return settings(settings(base, **self.sections), **sections)

    def get(self, executor: str, ranks: int = 1, server: str = "auto") -> tuple[Path, str]:
        """The folder of a run, and the digest of its last round."""
        name = f"{executor}-{ranks}-{server}"
        if name not in self._digests:
            # Three participants in lanes of two: several groups, and one that is padded.
            raw = self.settings(runtime={"executor": executor, "lanes": 2, "server": server})
            self._digests[name] = run(raw, self.folder / name, ranks)
        return self.folder / name, self._digests[name]

    def experiment(self) -> Experiment:
        return prepare(configuration.parse(self.settings()), torch.device("cpu"))


def same_bits(runs: Runs, executor: str, ranks: int, server: str = "auto") -> None:
    """State and scores of unseen clients are bitwise those of a run on one rank."""
    (several, digest), (one, expected_digest) = runs.get(executor, ranks, server), runs.get(executor)
    assert digest == expected_digest, (
        f"executor {executor}: other bits on {ranks} ranks: {_describe_difference(one, several)}"
    )
    scores, expected = (_read_metric(folder, 3, "unseen_correct") for folder in (several, one))
    assert np.array_equal(scores, expected), f"unseen clients on {ranks} ranks: {scores}, on one {expected}"


def exact_continuation(runs: Runs, absent: str, executor: str = "loop") -> None:
    """A run that is stopped on 3 ranks and resumed on 2 has the state, scores and bytes of one on 1 rank."""
    raw = runs.settings(runtime={"executor": executor, "lanes": 2}, evaluation={"absent": absent})
    whole, parts = (runs.folder / f"{name}-{absent}" for name in ("whole", "parts"))
    if absent == configuration.parse(runs.settings()).evaluation.absent:
        whole, unbroken = runs.get(executor)
    else:
        unbroken = run(raw, whole)
    run(settings(raw, training={"rounds": 2}), parts, 3)
    continued = resume(parts, ("training.rounds=3",), ranks=2)
    assert continued == unbroken, f"other bits after a continuation: {_describe_difference(whole, parts)}"
    for round in (1, 2, 3):
        expected, results = (_read_results(folder, round) for folder in (whole, parts))
        assert results.keys() == expected.keys(), f"round {round}: other results: {results.keys() ^ expected.keys()}"
        for name, array in expected.items():
            # In lanes the number of clients in a call may change last digits, and absent ones are tested anew.
            rtol = _ROUNDING if round == 3 and name.endswith("test_loss") else 0
            np.testing.assert_allclose(results[name], array, rtol=rtol, atol=0, err_msg=f"{name} of round {round}")


def loop_and_lanes_agree(runs: Runs, tolerance: float = _ROUNDING) -> None:
    """After two rounds, state and losses after local training in loop and lanes agree within rounding."""
    loop, lanes = (state_of(runs.get(executor)[0], 2) for executor in EXECUTORS)
    assert loop.keys() == lanes.keys(), f"loop and lanes keep other arrays: {loop.keys() ^ lanes.keys()}"
    for path, array in loop.items():
        # Which entries of a client's boolean arrays are chosen may flip between equals.
        if array.dtype != bool or path.startswith("server/"):
            np.testing.assert_allclose(array, lanes[path], atol=tolerance, err_msg=path)
    one, other = (_read_metric(runs.get(executor)[0], 2, "trained_client_test_loss") for executor in EXECUTORS)
    np.testing.assert_allclose(one, other, atol=10 * tolerance, err_msg="test loss after training")


def replayed_steps_are_the_steps(runs: Runs) -> None:
    """A pass in lanes, most of whose steps are replayed, has the bits of a pass without replay."""
    longer = {"rounds": 2, "epochs": 2, "batch_size": 5, "lr_decay": 0.9}
    raw = runs.settings(training=longer, runtime={"executor": "lanes", "lanes": 2})
    replayed = run(raw, runs.folder / "replayed")
    with without_replay():
        plain = run(raw, runs.folder / "plain")
    assert replayed == plain, "a loss depends on more than parameters, batch, and what is the same for the whole pass"


def micro_batches_are_the_batch(runs: Runs, tolerance: float = _ROUNDING) -> None:
    """Two rounds in micro batches end as those of whole batches, within rounding, or micro batches are refused."""
    raw = runs.settings(training={"micro_batch": 3, "rounds": 2}, runtime={"executor": "loop"})
    try:
        experiment = prepare(configuration.parse(raw), torch.device("cpu"))
    except ConfigError as refusal:
        assert "training.micro_batch" in str(refusal)
        return
    algorithm, architecture = experiment.config.algorithm, experiment.tasks[0].architecture
    if algorithm.draws_noise or architecture.draws_noise or architecture.has_batch_norm:
        return  # differs between micro batches
    run(raw, runs.folder / "micro")
    whole, micro = state_of(runs.get("loop")[0], 2), state_of(runs.folder / "micro", 2)
    for path, array in whole.items():
        if array.dtype != bool or path.startswith("server/"):
            np.testing.assert_allclose(micro[path], array, atol=tolerance, err_msg=f"{path} (see needs_whole_batch)")


def newcomers_agree(runs: Runs, tolerance: float = _ROUNDING) -> None:
    """In loop and lanes, clients that join after training have the same state within rounding."""
    folder = runs.get("loop")[0]
    leaves = []
    for executor in EXECUTORS:
        raw = runs.settings(runtime={"executor": executor, "lanes": 2}, evaluation={"unseen_updates": 2})
        ready = setup(prepare(configuration.parse(raw), torch.device("cpu")), 1, 1)
        if (unseen := ready.unseen) is None:  # a stated refusal
            return
        server, shared = restore.read_server(folder, 3), compute_newcomer_messages(ready, folder, 3)
        kept = restore.read_kept(ready, folder, 3)
        reply = receive_messages(unseen, InProcessTransport(), server, shared, kept, 3)
        states = [(group, join_newcomers(unseen, group, reply.for_clients(group), 3)) for group in unseen.groups[0]]
        rows = ((client, tree.row(state, row)) for group, state in states for row, client in enumerate(group.tolist()))
        leaves.append({(client, path): leaf for client, row in rows for path, leaf in tree.leaves(row)})
    loop, lanes = leaves
    assert loop.keys() == lanes.keys(), "loop and lanes give newcomers other states"
    for at, leaf in loop.items():
        if leaf.dtype != torch.bool:
            np.testing.assert_allclose(leaf.numpy(), lanes[at].numpy(), atol=tolerance, err_msg=f"newcomer {at}")


def declared_bytes(runs: Runs, executor: str = "loop") -> None:
    """In every round each participant sends and receives what is declared, and nobody else anything."""
    folder, experiment = runs.get(executor)[0], runs.experiment()
    task, algorithm = experiment.tasks[0], experiment.config.algorithm
    num_classes = (experiment.federation.class_counts > 0).sum(1)  # [N]
    for round in run_folder.rounds(folder)[-3:]:
        metrics, moved = run_folder.read_metrics(folder, round), run_folder.read_bytes(folder, round)
        present = np.isin(np.arange(len(num_classes)), metrics["participants"])
        for way, messages in (("up", algorithm.uplink(task)), ("down", algorithm.downlink(task))):
            declared = np.array([sum(kind.client_bytes(int(n)) for kind in messages.values()) for n in num_classes])
            expected = np.where(present, declared, 0)
            if way == "up" and round == 1 and algorithm.introduces:
                expected = expected + declared
            assert np.array_equal(moved[way], expected), f"round {round}: {moved[way]} bytes {way}, declared {expected}"


def no_randomness_of_its_own(runs: Runs) -> None:
    """The state does not depend on global random generators."""
    with _global_seed(1):
        digest = run(runs.settings(runtime={"executor": "loop"}), runs.folder / "global-seed")
    assert digest == runs.get("loop")[1], "the state depends on a global generator (random, numpy.random, torch)"


def state_of(folder: Path, round: int = 3) -> dict[str, np.ndarray]:
    """Arrays of the server and of all clients after a round, by path."""
    state = {f"server/{path}": array for path, array in run_folder.read_server(folder, round).items()}
    clients = np.arange(len(run_folder.read_layout(folder, round).file))
    cohorts = run_folder.read_clients(folder, round, clients)
    for cohort, (_, arrays) in cohorts.items():
        where = "clients" if len(cohorts) == 1 else cohort
        state.update({f"{where}/{path}": array for path, array in arrays.items()})
    return state


def _describe_difference(one: Path, other: Path) -> str:
    """Names the first arrays that differ after the last round of two runs."""
    server, clients = differing_arrays(*(open_run(folder).round(3) for folder in (one, other)))
    paths = [f"server/{path}" for path in server]
    paths += [f"{path} of client {client}" for client, own in clients.items() for path in own]
    return join_truncated(paths) if paths else "the digests differ, and no array does"


def _read_metric(folder: Path, round: int, name: str) -> np.ndarray:
    """Reads a metric of a round; empty if the algorithm does not support it."""
    values = run_folder.read_array(folder, round, "metrics", name)
    return np.empty(0, np.int64) if values is None else values


def _read_results(folder: Path, round: int) -> dict[str, np.ndarray]:
    """Reads the metrics of a round, without its times, and each client's bytes."""
    metrics, moved = run_folder.read_metrics(folder, round), run_folder.read_bytes(folder, round)
    timeless = {name: array for name, array in metrics.items() if not name.startswith("seconds_")}
    return {**timeless, "up": moved["up"], "down": moved["down"]}


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class AlgorithmTests:
    """Tests the properties of every algorithm on a small experiment in this process.

    Attributes:
        algorithm: its class; or its name as in a configuration, where a file is relative to that of the tests.
        options: values for its fields.
        sections: further sections of the configuration, such as another model.
        executors: executors to test and compare; without "lanes" clients are only trained one by one,
            as a model with batch norm needs it.
        tolerance: absolute tolerance between loop and lanes.
    """

    algorithm: ClassVar[type[Algorithm] | str]
    options: ClassVar[Mapping[str, Any]] = {}
    sections: ClassVar[Mapping[str, Any]] = {}
    executors: ClassVar[tuple[str, ...]] = EXECUTORS
    tolerance: ClassVar[float] = 1e-5
    _runs: ClassVar[Runs]

    @pytest.fixture
    def runs(self, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        """Runs shared by the tests of the class."""
        kind = type(self)
        if "_runs" not in vars(kind):
            section = {"name": self._name(), **self.options}
            kind._runs = Runs({**self.sections, "algorithm": section}, tmp_path_factory.mktemp("runs"))
        return kind._runs

    @pytest.mark.parametrize("executor, ranks", [("loop", 2), ("loop", 5), ("lanes", 3)])
    def test_same_bits_on_any_number_of_ranks(self, runs: Runs, executor: str, ranks: int) -> None:
        if executor in self.executors:
            same_bits(runs, executor, ranks)

    def test_same_bits_with_a_rank_for_the_server_alone(self, runs: Runs) -> None:
        same_bits(runs, "loop", 5, "dedicated")

    @pytest.mark.parametrize("absent", ["latest", "last_received"])
    def test_a_continued_run_has_the_bits_of_an_unbroken_one(self, runs: Runs, absent: str) -> None:
        exact_continuation(runs, absent)

    def test_loop_and_lanes_agree_within_rounding(self, runs: Runs) -> None:
        if "lanes" in self.executors:
            loop_and_lanes_agree(runs, self.tolerance)

    def test_micro_batches_are_the_batch_or_are_refused(self, runs: Runs) -> None:
        micro_batches_are_the_batch(runs, self.tolerance)

    def test_replayed_steps_are_the_steps(self, runs: Runs) -> None:
        if "lanes" in self.executors:
            replayed_steps_are_the_steps(runs)

    def test_newcomers_are_the_same_in_loop_and_lanes(self, runs: Runs) -> None:
        if "lanes" in self.executors:
            newcomers_agree(runs, self.tolerance)

    def test_counted_bytes_are_the_declared_ones(self, runs: Runs) -> None:
        declared_bytes(runs)

    def test_it_draws_nothing_at_random_by_itself(self, runs: Runs) -> None:
        no_randomness_of_its_own(runs)

    def _name(self) -> str:
        if isinstance(self.algorithm, str):
            return outside.make_absolute(self.algorithm, Path(inspect.getfile(type(self))).parent)
        return f"{self.algorithm.__module__}:{self.algorithm.__qualname__}"

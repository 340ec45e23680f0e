"""The tests of an algorithm as a class: subclass it, name the algorithm, and run pytest."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pflmpi import outside
from pflmpi.algorithms.base import Algorithm
from pflmpi.testing.conformance import (
    EXECUTORS,
    Runs,
    declared_bytes,
    exact_continuation,
    loop_and_lanes_agree,
    newcomers_agree,
    no_randomness_of_its_own,
    replayed_steps_are_the_steps,
    same_bits,
)


class AlgorithmTests:
    """What every algorithm must keep, on a small experiment in this process.

    Attributes:
        algorithm: its class; or its name as in a configuration, where a file is relative to that of the tests.
        options: values for its fields.
        sections: further sections of the configuration, such as another model.
        executors: those that it must agree in; without "lanes" it is only tried client by client.
        tolerance: by how much loop and lanes may differ.
    """

    algorithm: ClassVar[type[Algorithm] | str]
    options: ClassVar[Mapping[str, Any]] = {}
    sections: ClassVar[Mapping[str, Any]] = {}
    executors: ClassVar[tuple[str, ...]] = EXECUTORS
    tolerance: ClassVar[float] = 1e-5
    _runs: ClassVar[Runs]

    @pytest.fixture
    def runs(self, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        """The runs that the tests of the class share."""
        kind = type(self)
        if "_runs" not in vars(kind):
            section = {"name": self._name(), **self.options}
            kind._runs = Runs({**self.sections, "algorithm": section}, tmp_path_factory.mktemp("runs"))
        return kind._runs

    @pytest.mark.parametrize("executor, ranks", [("loop", 2), ("loop", 5), ("lanes", 3)])
    def test_same_bits_on_any_number_of_ranks(self, runs: Runs, executor: str, ranks: int) -> None:
        """See `same_bits`."""
        if executor in self.executors:
            same_bits(runs, executor, ranks)

    def test_same_bits_with_a_rank_for_the_server_alone(self, runs: Runs) -> None:
        """See `same_bits`."""
        same_bits(runs, "loop", 5, "dedicated")

    @pytest.mark.parametrize("absent", ["latest", "last_received"])
    def test_a_continued_run_has_the_bits_of_an_unbroken_one(self, runs: Runs, absent: str) -> None:
        """See `exact_continuation`."""
        exact_continuation(runs, absent)

    def test_loop_and_lanes_agree_within_rounding(self, runs: Runs) -> None:
        """See `loop_and_lanes_agree`."""
        if "lanes" in self.executors:
            loop_and_lanes_agree(runs, self.tolerance)

    def test_replayed_steps_are_the_steps(self, runs: Runs) -> None:
        """See `replayed_steps_are_the_steps`."""
        if "lanes" in self.executors:
            replayed_steps_are_the_steps(runs)

    def test_newcomers_are_the_same_in_loop_and_lanes(self, runs: Runs) -> None:
        """See `newcomers_agree`."""
        if "lanes" in self.executors:
            newcomers_agree(runs, self.tolerance)

    def test_counted_bytes_are_the_declared_ones(self, runs: Runs) -> None:
        """See `declared_bytes`."""
        declared_bytes(runs)

    def test_it_draws_nothing_at_random_by_itself(self, runs: Runs) -> None:
        """See `no_randomness_of_its_own`."""
        no_randomness_of_its_own(runs)

    def _name(self) -> str:
        if isinstance(self.algorithm, str):
            return outside.located(self.algorithm, Path(inspect.getfile(type(self))).parent)
        return f"{self.algorithm.__module__}:{self.algorithm.__qualname__}"

"""Copies overlap with computing: a group goes up while the one before computes, in order, and with the host's bits."""

from unittest import mock

import pytest
import torch

import stub_run
from every_algorithm import every_algorithm
from fake_streams import FakeStream, Timeline, fake_streams
from pflmpi.runtime import rounds
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import pipelined


def run(case, executor):
    """A round of three groups on the stub device with streams, the same on the host, and what happened."""
    raw = stub_run.settings(every_algorithm()[case], "mlp", executor)
    raw["runtime"]["lanes"] = 1
    with fake_streams() as timeline:

        def noted(self, *args):
            timeline.log.append("begin")
            return update(self, *args)

        update = Executor.update
        with mock.patch.object(Executor, "update", noted):
            found = stub_run.run(raw, True)
    return found, stub_run.run(raw, False), timeline


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("case", ["fedavg", "fedproto", "ditto", "fedgmh-full"])
def test_a_group_is_begun_before_the_one_before_is_waited_for(case, executor):
    torch.set_num_threads(1)
    found, expected, timeline = run(case, executor)
    assert timeline.races == []
    for path, leaf in expected.values.items():
        torch.testing.assert_close(found.values[path], leaf, rtol=0, atol=0)
    first = timeline.log.index("begin")
    one = ["begin", "up", "down"]
    assert timeline.log[first : first + 12] == [*one, *one, "wait", *one, "wait", "wait"]
    assert timeline.up.waits == set(), "what goes up waits for no results"


def test_unseen_clients_are_begun_before_those_before_are_waited_for():
    torch.set_num_threads(1)
    raw = stub_run.settings(every_algorithm()["fedper"], "mlp", "loop")
    raw["runtime"]["lanes"], raw["evaluation"] = 1, {"unseen": 0.67}  # two of three
    evaluate_unseen = rounds.evaluate_unseen
    with fake_streams() as timeline:

        def noted(*args):
            timeline.log.append("unseen")
            return evaluate_unseen(*args)

        with mock.patch.object(rounds, "evaluate_unseen", noted):
            stub_run.run(raw, True)
    assert timeline.races == []
    first = timeline.log.index("unseen")
    joins, test = ["up", "down", "wait"], ["up", "down"]  # a newcomer trains its head before it is tested
    assert timeline.log[first:] == ["unseen", *joins, *test, *joins, *test, "wait", "wait"]


def _forgetting(name):
    wait_stream = FakeStream.wait_stream
    return lambda self, other: None if self.name == name else wait_stream(self, other)


@pytest.mark.parametrize("queue", ["computing", "down", "host"])
def test_a_queue_that_does_not_wait_is_found(queue):
    torch.set_num_threads(1)
    with mock.patch.object(FakeStream, "wait_stream", _forgetting(queue)):
        _, _, timeline = run("ditto", "lanes")
    assert any(f"on {queue} does not wait" in race for race in timeline.races)


def test_memory_that_is_given_away_too_early_is_found():
    torch.set_num_threads(1)
    with mock.patch.object(Timeline, "keep", lambda *_: None):
        _, _, timeline = run("ditto", "lanes")
    found = " ".join(timeline.races)
    assert "of up may be given away before computing" in found and "of computing may be given away before down" in found


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0, "b0 w0 b1 w1 b2 w2"), (1, "b0 b1 w0 b2 w1 w2"), (5, "b0 b1 b2 w0 w1 w2")]
)
def test_as_many_are_begun_ahead_as_asked(ahead, expected):
    log: list[str] = []

    def begin(number):
        log.append(f"b{number}")
        return lambda: log.append(f"w{number}") or number

    assert list(pipelined(map(begin, range(3)), ahead)) == [0, 1, 2]
    assert log == expected.split()

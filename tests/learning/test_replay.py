"""Steps that are replayed: the same bits as steps that are taken, and none is replayed that might be another one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import small_task
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.algorithms.local_only import Local
from pflmpi.learning import program, replay
from pflmpi.learning.client import Batch, ClientData, model_loss
from pflmpi.learning.recording import Recording
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs
from pflmpi.tree import Tree, part

# Each of their steps is made by hand, or their passes are of a few steps.
NEVER = {"pfedme", "perfedavg", "perfedavg-hessian_free"}
ALSO_QUICK = (*MESSAGE_KINDS, "apfl", "fedcp", "gpfl", "pfedpm-relation")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that have been run since, once for each run."""
    seen: list[Any] = []

    run = program.Program.run
    monkeypatch.setattr(program.Program, "run", lambda self, *given: (seen.append(self), run(self, *given))[1])
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in ALSO_QUICK else [pytest.mark.slow]) for one in every_algorithm()],
)
def test_a_replayed_pass_gives_the_same_bits(name: str, replayed: list[Any], tmp_path: Path) -> None:
    conformance.replayed_steps_are_the_steps(Runs(every_algorithm()[name], tmp_path))
    if name != "l2gd":  # chance decides how long its passes are
        assert bool(replayed) == (name not in NEVER)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8}, {"precision": "bf16"}),
        ({"name": "dropout_cnn"}, {}),
    ],
    ids=["bf16", "dropout"],
)
def test_other_arithmetic_and_noise_by_key_are_replayed(
    model: dict[str, Any], training: dict[str, Any], replayed: list[Any], tmp_path: Path
) -> None:
    sections = {"algorithm": {"name": "fedavg"}, "model": model, "training": training}
    conformance.replayed_steps_are_the_steps(Runs(sections, tmp_path))
    assert replayed


def test_a_loss_that_changes_now_and_then_fails_the_tests_of_its_algorithm(tmp_path: Path) -> None:
    """It is not found by two steps that are alike, so the tests of an algorithm look at a whole pass."""
    with pytest.raises(AssertionError, match="a loss depends on more"):
        conformance.replayed_steps_are_the_steps(Runs({"algorithm": {"name": f"{__file__}:NowAndThen"}}, tmp_path))


class NowAndThen(Local):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        plain, steps = model_loss(task), iter(range(10**9))

        def loss(model: Tree, batch: Batch) -> Tensor:
            return plain(model, batch) * (2 if next(steps) % 5 == 4 else 1)

        return {"model": train(task, part(client, "model"), data.passes["train"], loss, data.learning_rate)}, {}


class Unlike:
    """Steps that look alike and are not."""

    def __init__(self) -> None:
        self.weight, self.total, self.count = torch.ones(3), torch.zeros(()), 0
        self.many = [torch.full((3,), float(each)) for each in range(20)]

    def counter(self, batch: Batch) -> None:
        self.count += 1
        self.weight.sub_(batch.x.mean(), alpha=1 / self.count)

    def another_tensor(self, batch: Batch) -> None:
        self.count += 1
        self.weight.add_(self.many[self.count] * batch.x.mean())

    def rebinds(self, batch: Batch) -> None:
        self.total = self.total + batch.x.mean()
        self.weight.sub_(self.total)

    def looks(self, batch: Batch) -> None:
        self.weight.sub_(1.0 if float(batch.x.mean()) > 0 else batch.x.std())

    def mask(self, batch: Batch) -> None:
        self.weight.sub_(batch.x[batch.x > 0].sum())


class Alike(Unlike):
    """Steps that may be replayed."""

    def places(self, batch: Batch) -> None:
        self.weight.sub_(batch.x.flatten()[batch.y].sum())

    def views(self, batch: Batch) -> None:
        first, *rest = self.weight.unbind(0)
        first.sub_(batch.x.view(batch.x.shape).expand(batch.x.shape).mean())
        rest[1].mul_(first.detach()).clamp_(-1, 1)

    def several(self, batch: Batch) -> None:
        _, place = batch.x.flatten().max(0)
        low, high = torch.aminmax(batch.x)
        torch._foreach_add_([self.weight, self.many[0]], [low * place, high])


def _both(kind: type[Unlike], name: str, steps: int = 12) -> tuple[Unlike, Unlike]:
    """The steps taken one by one, and as `Steps` takes them."""
    plain, other = kind(), kind()
    taken = replay.Steps(getattr(other, name), name, steps)
    for seed in range(steps):
        getattr(plain, name)(small_task.batch(seed))
        taken.take(small_task.batch(seed))
    return plain, other


@pytest.mark.parametrize("name", ["counter", "another_tensor", "rebinds", "looks", "mask"])
def test_a_step_that_may_be_another_one_is_not_replayed(name: str, replayed: list[Any]) -> None:
    plain, other = _both(Unlike, name)
    assert torch.equal(plain.weight, other.weight) and not replayed


@pytest.mark.parametrize("name", ["places", "views", "several"])
def test_a_step_of_batch_and_what_stays_in_place_is_replayed(name: str, replayed: list[Any]) -> None:
    program._program.cache_clear()
    plain, other = _both(Alike, name)
    assert torch.equal(plain.weight, other.weight) and torch.equal(plain.many[0], other.many[0])
    assert len(replayed) == 12 - 2, "two are recorded"


class MakesOne(Unlike):
    """Its first step makes what all of them use."""

    made: Tensor | None = None

    def makes(self, batch: Batch) -> None:
        self.made = torch.full((3,), 2.0) if self.made is None else self.made
        self.weight.sub_(self.made * batch.x.mean())


@pytest.mark.parametrize(("kind", "name", "recorded"), [(Alike, "places", 2), (MakesOne, "makes", 3)])
def test_the_next_pass_records_a_step_less(kind: type[Unlike], name: str, recorded: int, replayed: list[Any]) -> None:
    program._program.cache_clear()
    for expected in (12 - recorded, 12 - recorded + 1):
        replayed.clear()
        plain, other = _both(kind, name)
        assert torch.equal(plain.weight, other.weight) and len(replayed) == expected


def test_a_batch_that_is_alone_of_its_form_in_every_pass_is_recorded_once(replayed: list[Any]) -> None:
    program._program.cache_clear()
    recorded = []
    for _ in range(3):
        plain, other = Alike(), Alike()
        taken = replay.Steps(other.places, "a smaller last batch", 12)
        with mock.patch.object(replay, "Recording", side_effect=replay.Recording) as recordings:
            for seed in range(12):
                batch = small_task.batch(seed, size=6 if seed < 11 else 4)
                plain.places(batch)
                taken.take(batch)
            taken.end()
        recorded.append(recordings.call_count)
        assert torch.equal(plain.weight, other.weight)
    assert recorded == [3, 1, 1] and len(replayed) == 9 + 10 + 10


def test_batches_of_another_form_have_a_recording_of_their_own(replayed: list[Any]) -> None:
    plain, other = Alike(), Alike()
    taken = replay.Steps(other.places, "sizes", 30)
    for seed in range(30):
        batch = small_task.batch(seed, size=6 + seed % 3)
        plain.places(batch)
        taken.take(batch)
    assert torch.equal(plain.weight, other.weight) and len(replayed) == 30 - 3 * 2


def test_a_short_pass_is_taken_step_by_step(replayed: list[Any]) -> None:
    _both(Alike, "places", steps=7)
    assert not replayed


def _recorded(step: Callable[[Tensor], None]) -> list[str]:
    one = torch.arange(6.0).view(2, 3)
    with Recording([one]) as seen:
        step(one)
    return [str(call.operation) for call in seen._calls]


def test_views_that_change_nothing_and_views_of_what_is_kept_are_no_operations() -> None:
    weight = torch.ones(3, 2)
    assert _recorded(lambda x: weight.add_(x.view(2, 3).expand(2, 3).t())) == ["aten.t.default", "aten.add_.Tensor"]
    assert _recorded(lambda x: weight.t().unsqueeze(0)[0].add_(x)) == ["aten.add_.Tensor"]
    assert _recorded(lambda x: weight.add_(x.t().t().t())) == ["aten.t.default"] * 2 + ["aten.add_.Tensor"]

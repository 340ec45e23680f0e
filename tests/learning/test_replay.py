"""Steps that are replayed: the same bits as steps that are taken, and none is replayed that might be another one."""

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import processes
import quick_run
import small_task
from every_algorithm import LOSSES, every_algorithm
from pflmpi.algorithms.local_only import Local
from pflmpi.errors import AlgorithmError
from pflmpi.learning import replay, sgd
from pflmpi.learning.client import Batch, ClientData, model_loss
from pflmpi.learning.program import PYTHON_BINDINGS, Recording
from pflmpi.learning.replay import function_key
from pflmpi.learning.sgd import train
from pflmpi.learning.task import Task
from pflmpi.messages.kinds import Messages
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs
from pflmpi.tree import Tree, part


@pytest.fixture
def replayed(monkeypatch):
    """The programs that have been run since, once for each run."""
    seen = []
    run = replay.Steps._run
    monkeypatch.setattr(replay.Steps, "_run", lambda self, *args: (seen.append(args[0]), run(self, *args))[1])
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(case, marks=[] if case in LOSSES else [pytest.mark.slow]) for case in every_algorithm()],
)
def test_a_replayed_pass_gives_the_same_bits(name, replayed, tmp_path):
    conformance.replayed_steps_are_the_steps(Runs(every_algorithm()[name], tmp_path))
    assert replayed


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"name": "cnn", "kernel": 3, "padding": 1, "hidden": 8}, {"precision": "bf16"}),
        ({"name": "dropout_cnn"}, {}),
    ],
    ids=["bf16", "dropout"],
)
def test_other_arithmetic_and_noise_by_key_are_replayed(model, training, replayed, tmp_path):
    sections = {"algorithm": {"name": "fedavg"}, "model": model, "training": training}
    conformance.replayed_steps_are_the_steps(Runs(sections, tmp_path))
    assert replayed


def test_a_loss_that_changes_now_and_then_fails_the_tests_of_its_algorithm(tmp_path):
    """It is not found by two steps that are alike, so the tests of an algorithm look at a whole pass."""
    with pytest.raises(AssertionError, match="a loss depends on more"):
        conformance.replayed_steps_are_the_steps(Runs({"algorithm": {"name": f"{__file__}:NowAndThen"}}, tmp_path))


class NowAndThen(Local):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        plain, steps = model_loss(task), [0]

        def loss(model, batch):
            steps[0] += 1
            return plain(model, batch) * (2 if steps[0] % 5 == 0 else 1)

        return {"model": train(task, part(client, "model"), data.passes["train"], loss, data.learning_rate)}, {}


class Steps:
    """Steps on a weight and a total, with a learning rate."""

    def __init__(self, rate: float = 0.1) -> None:
        self.weight, self.total, self.rate, self.count = torch.ones(3), torch.zeros(()), rate, 0
        self.elsewhere = torch.full((3,), 2.0)

    def places(self, batch: Batch) -> None:
        self.weight.sub_(batch.x.flatten()[batch.y].sum())

    def views(self, batch: Batch) -> None:
        first, *rest = self.weight.unbind(0)
        first.sub_(batch.x.view(batch.x.shape).expand(batch.x.shape).mean())
        rest[1].mul_(first.detach()).clamp_(-1, 1)

    def several(self, batch: Batch) -> None:
        _, place = batch.x.flatten().max(0)
        low, high = torch.aminmax(batch.x)
        torch._foreach_add_([self.weight, self.total], [low * place, high])

    def descent(self, batch: Batch) -> None:
        torch._foreach_sub_([self.weight], [self.weight * torch.tensor([1.0, 2.0, 3.0])], alpha=self.rate)

    def counter(self, batch: Batch) -> None:
        self.count += 1
        self.weight.sub_(batch.x.mean(), alpha=1 / self.count)

    def looks(self, batch: Batch) -> None:
        self.weight.sub_(1.0 if float(batch.x.mean()) > 0 else batch.x.std())

    def mask(self, batch: Batch) -> None:
        self.weight.sub_(batch.x[batch.x > 0].sum())

    def reads_elsewhere(self, batch: Batch) -> None:
        self.weight.sub_(self.elsewhere)

    def rebinds(self, batch: Batch) -> None:
        self.total = self.total + batch.x.mean()
        self.weight.sub_(self.total)


@pytest.fixture(autouse=True)
def _nothing_traced():
    replay._traces.cache_clear()


def _both(name, sizes=(6,) * 12, rate=0.1):
    """Checks that the steps of a pass, as `Steps` takes them, have the bits of steps taken one by one."""
    plain, traced = Steps(rate), Steps(rate)
    steps = replay.Steps(getattr(traced, name), name, [traced.weight, traced.total], 2, (rate,) * (name == "descent"))
    for seed, size in enumerate(sizes):
        getattr(plain, name)(small_task.batch(seed, size))
        steps.take(small_task.batch(seed, size))
    steps.end()
    assert torch.equal(plain.weight, traced.weight) and torch.equal(plain.total, traced.total)


@pytest.mark.parametrize("name", ["counter", "looks", "mask"])
def test_a_step_that_may_be_another_one_is_not_replayed(name, replayed):
    _both(name)
    assert not replayed


@pytest.mark.parametrize("name", ["places", "views", "several", "descent"])
def test_two_steps_of_a_process_are_traced_and_all_others_replayed_on_the_state_of_their_pass(name, replayed):
    for expected in (12 - 2, 12):
        replayed.clear()
        _both(name)
        assert len(replayed) == expected


def test_another_learning_rate_is_not_traced_anew(replayed):
    for rate in (0.1, 0.05, 0.025):
        _both("descent", rate=rate)
    assert len(replayed) == 3 * 12 - 2


def test_batches_of_each_form_are_traced_apart(replayed):
    _both("places", [6 + seed % 3 for seed in range(30)])
    assert len(replayed) == 30 - 3 * 2
    _both("places", [6, 7, 8])
    assert len(replayed) == 30 - 3 * 2 + 3, "also where each comes once in a pass"


def test_tensors_that_are_one_in_one_pass_and_two_in_another_are_not_taken_for_each_other():
    def passed(first, second):
        weight = torch.ones(3)
        steps = replay.Steps(lambda batch: weight.add_(first - 2 * second), "alias", [weight, first, second], 1, ())
        for seed in range(4):
            steps.take(small_task.batch(seed))
        return weight

    first, second = torch.ones(3), torch.full((3,), 5.0)
    assert passed(first, first).tolist() == [-3.0] * 3 and passed(first, second).tolist() == [1 - 4 * 9.0] * 3


@pytest.mark.parametrize("name", ["reads_elsewhere", "rebinds"])
def test_a_step_that_reads_a_tensor_from_elsewhere_is_refused(name):
    with pytest.raises(replay.ReadsElsewhere):
        _both(name)


class ReadsAClosure(Local):
    def client_update(self, task: Task, client: Tree, down: Messages, data: ClientData) -> tuple[Tree, Messages]:
        plain, prior = model_loss(task), data.class_counts.log()

        def loss(model, batch):
            return plain(model, batch) + prior.clamp(min=0).sum()

        return {"model": train(task, part(client, "model"), data.passes["train"], loss, data.learning_rate)}, {}


def test_a_loss_that_closes_over_a_tensor_is_refused_by_name_with_what_to_do(tmp_path):
    sections = {"algorithm": {"name": f"{__file__}:ReadsAClosure"}, "runtime": {"executor": "lanes"}}
    with pytest.raises(AlgorithmError, match=r"reads the tensor 'prior' of shape .* as fixed=\{'prior': \.\.\.\}"):
        quick_run.run(quick_run.settings(sections), tmp_path / "run", 1)


def test_what_a_function_closes_over_is_compared_by_value_but_for_tensors():
    def loss_of(task, factor, tensor, more=None):
        inner = {"a": [1, tensor]}
        return lambda x: (task, factor, tensor, inner, more)

    task = small_task.task()
    key = function_key(loss_of(task, 2.0, torch.ones(2)))
    assert key == function_key(loss_of(task, 2.0, torch.zeros(2))) != function_key(loss_of(task, 3.0, torch.ones(2)))
    assert key != function_key(loss_of(task, 2, torch.ones(2))) and hash(key)
    assert function_key(loss_of(task, 2.0, torch.ones(2), iter([]))) is None, "what may be anything is not replayed"


def _recorded(step, weight):
    tensor = torch.arange(6.0).view(2, 3)
    with Recording([tensor], [weight]) as seen:
        step(tensor)
    return [str(call.operation) for call in seen._calls]


def test_views_that_change_nothing_and_views_of_the_state_are_no_operations_of_a_step():
    weight = torch.ones(3, 2)
    calls = ["aten.t.default", "aten.add_.Tensor"]
    assert _recorded(lambda x: weight.add_(x.view(2, 3).expand(2, 3).t()), weight) == calls
    assert _recorded(lambda x: weight.t().unsqueeze(0)[0].add_(x), weight) == ["aten.add_.Tensor"]
    assert _recorded(lambda x: weight.add_(x.t().t().t()), weight) == ["aten.t.default", *calls]


def test_a_loss_is_not_looked_into_where_no_step_is_replayed(monkeypatch, tmp_path):
    raw = quick_run.settings({"algorithm": {"name": "fedavg"}}, runtime={"executor": "loop"})
    expected = quick_run.run(raw, tmp_path / "with", 1)
    monkeypatch.setattr(sgd, "function_key", None)  # a call would raise an error
    assert quick_run.run(raw, tmp_path / "without", 1) == expected


_ONES, _TWOS = torch.ones(2, 3, 3), torch.full((2, 3, 3), 2.0)
_ARGUMENTS = {
    "_foreach_sub_": ([_ONES], [_TWOS]),
    "_log_softmax": (_ONES, 1, False),
    "_log_softmax_backward_data": (_ONES, _TWOS, 1, torch.float32),
    "expand": (_ONES, [2, 2, 3, 3]),
    "neg": (_ONES,),
    "pow": (_TWOS, 3),
    "relu": (_ONES,),
    "sum": (_TWOS, [0, 2], True),
    "transpose": (_TWOS, 0, 1),
    "unsqueeze": (_TWOS, 1),
    "view": (_TWOS, [6, 3]),
}


def test_what_nobody_reads_is_not_computed_and_nothing_is_held_longer_than_read():
    weight = torch.ones(2, 3)

    def step(x):
        _ = x * 3
        low, _ = (x * 2).min(0)
        weight.add_(low)

    tensor = torch.arange(6.0).view(2, 3)
    with Recording([tensor], [torch.ones(1), weight]) as seen:
        step(tensor)
    assert [line.strip() for line in seen.program().source.splitlines()] == [
        "def bind(s0, s1):",
        "return (s1, )",
        "def run(b0, s1):",
        "r1 = aten_mul_Tensor(b0, 2)",
        "r2, _, = aten_min_dim(r1, 0)",
        "del r1",
        "aten_add__Tensor(s1, r2)",
        "del r2",
        "return None",
    ]


INTERRUPTED = """
import sys
from pflmpi.learning.program import Program

def interrupt(frame, event, argument):
    if frame.f_code.co_filename in ("<string>", "<traced step>"):
        sys.settrace(None)
        raise KeyboardInterrupt

sys.settrace(interrupt)
try:
    Program([], [], [], 1, 1, 0)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_after_an_interrupt_while_a_program_is_made_the_exit_code_is_that_of_the_command(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    assert processes.call([sys.executable, "-m", "interrupted"], cwd=tmp_path).returncode == 7


@pytest.mark.parametrize("operation", PYTHON_BINDINGS, ids=str)
def test_a_function_calls_the_operation_that_it_stands_for(operation):
    arguments = _ARGUMENTS.get(operation._schema.name.removeprefix("aten::"), (_TWOS, _ONES))
    changed = {"alpha": 0.5} if any(argument.name == "alpha" for argument in operation._schema.arguments) else {}
    for more in ({}, changed):
        by_binding, by_operation = (
            _calls(function, arguments, more) for function in (PYTHON_BINDINGS[operation], operation)
        )
        assert by_binding == by_operation == [(operation, arguments, more)]


def _calls(function, arguments, more):
    """What a call comes to: operations with their arguments."""
    with _Called() as called:
        function(*arguments, **more)
    return called.calls


class _Called(TorchDispatchMode):
    """Notes which operations are called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

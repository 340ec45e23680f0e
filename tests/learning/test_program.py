"""Lists of operations as functions: what they call, and what they leave out."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pflmpi.learning.program import PYTHON_BINDINGS, Recording

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

    one = torch.arange(6.0).view(2, 3)
    with Recording([one], [torch.ones(1), weight]) as seen:
        step(one)
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


@pytest.mark.parametrize("operation", PYTHON_BINDINGS, ids=str)
def test_a_function_calls_the_operation_that_it_stands_for(operation):
    given = _ARGUMENTS.get(operation._schema.name.removeprefix("aten::"), (_TWOS, _ONES))
    changed = {"alpha": 0.5} if any(one.name == "alpha" for one in operation._schema.arguments) else {}
    for more in ({}, changed):
        by_binding, by_operation = (_calls(each, given, more) for each in (PYTHON_BINDINGS[operation], operation))
        assert by_binding == by_operation == [(operation, given, more)]


def _calls(function, given, more):
    """What a call comes to: operations with their arguments."""
    with _Called() as called:
        function(*given, **more)
    return called.calls


class _Called(TorchDispatchMode):
    """Notes which operations are called, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

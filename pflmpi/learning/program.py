"""A list of operations as a function that runs them: Python's source, compiled.

PyTorch looks at every argument of a call of `torch.ops`, so most operations are called by its Python bindings, such as
`torch.mul`: 1 us less for each of some 30 in a step in lanes, 4 % of a step of ten small perceptrons.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_aten = torch.ops.aten
PYTHON_BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    _aten._foreach_sub_.List: torch._foreach_sub_,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.bmm.default: torch.bmm,
    _aten.div.Tensor: torch.div,
    _aten.expand.default: torch.Tensor.expand,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.relu.default: torch.relu,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}


@dataclass(frozen=True)
class Call:
    """An operation with the names of its results and the text of its arguments."""

    results: str | list[str]
    operation: OpOverload
    arguments: str
    reads: set[str]


class Program:
    """A list of operations as a function of the tensors of a batch and of what is kept from step to step."""

    def __init__(self, source: str, operations: Sequence[OpOverload]) -> None:
        names: dict[str, Any] = {_name(one): PYTHON_BINDINGS.get(one, one) for one in operations}
        exec(source, names)  # names of operations and tensors, integers, texts: nothing that a file says
        self._run: Callable[..., None] = names["run"]
        self.repeats: dict[Hashable, bool] = {}  # by the kind of step and its number, whether the next was the same
        self.uses: dict[Hashable, Any] = {}  # of `capture`, by the layout of the tensors

    def run(self, batch: Sequence[Tensor], kept: Sequence[Any]) -> None:
        """Run the operations, in place on what is kept."""
        self._run(*batch, *kept)


def compile_calls(calls: Sequence[Call], num_batch: int, num_kept: int) -> Program:
    """The calls as a function of so many tensors of a batch, and of what is kept; the same for equal lists."""
    operations = dict.fromkeys(call.operation for call in calls)
    return _program(source(calls, num_batch, num_kept), tuple(operations))


def source(calls: Sequence[Call], num_batch: int, num_kept: int) -> str:
    """The function that makes the calls; each result ends after the last call that reads it."""
    lines: list[str] = []
    later: set[str] = set()
    for call in reversed(calls):
        lines += reversed(_lines(call, later))
        later |= call.reads
    inputs = [*(f"b{place}" for place in range(num_batch)), *(f"k{place}" for place in range(num_kept))]
    return "\n    ".join([f"def run({', '.join(inputs)}):", *reversed(lines), "return None"])


@lru_cache(maxsize=256)  # a process has few kinds of steps, each taken in many passes
def _program(source: str, operations: tuple[OpOverload, ...]) -> Program:
    return Program(source, operations)


def _lines(call: Call, later: set[str]) -> list[str]:
    """The lines of a call, given what is read after it; none if that is nothing."""
    results = [call.results] if isinstance(call.results, str) else call.results
    changes = call.operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.operation.tags
    if not changes and not later & set(results):
        return []
    text = f"{_name(call.operation)}({call.arguments})"
    if later & set(results):
        read = [name if name in later else "_" for name in results]
        text = f"{', '.join(read)}{'' if isinstance(call.results, str) else ','} = {text}"
    ended = sorted(name for name in call.reads - later - set(results) if name.startswith("r"))
    return [text, *([f"del {', '.join(ended)}"] if ended else [])]


def _name(operation: OpOverload) -> str:
    return str(operation).replace(".", "_")

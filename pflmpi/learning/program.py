"""A list of operations as a function that runs them: Python's source, compiled.

PyTorch looks at every argument of a call of `torch.ops`, so most operations are called by its Python bindings, such as
`torch.mul`: 1 us less for each of some 30 in a step in lanes, 4 % of a step of ten small perceptrons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """The operations of a step as a function of a batch, of the state that they change, and of learning rates.

    Args:
        views: of the state, made once for all steps of a pass.
        calls: of the step.
        constants: what the calls read besides, k0, k1, ...
        num_batch, num_state, num_rates: tensors of a batch b0, ..., of the state s0, ..., numbers n0, ...

    Attributes:
        source: what is run; the same for equal steps.
    """

    def __init__(
        self,
        views: Sequence[Call],
        calls: Sequence[Call],
        constants: Sequence[Any],
        num_batch: int,
        num_state: int,
        num_rates: int,
    ) -> None:
        lines, used = body(calls)
        made, _ = body(views, used)
        kept = sorted(name for name in used if name[0] in "sv")
        state, batch, rates = (
            ", ".join(f"{letter}{place}" for place in range(count))
            for letter, count in (("s", num_state), ("b", num_batch), ("n", num_rates))
        )
        given = [*filter(None, (batch, ", ".join(kept), rates))]
        self.source = (
            f"def bind({state}):\n    {_indented([*made, f'return ({_tuple(kept)})'])}\n"
            f"def run({', '.join(given)}):\n    {_indented([*lines, 'return None'])}"
        )
        operations = dict.fromkeys(call.operation for call in (*views, *calls))
        names: dict[str, Any] = {_name(one): PYTHON_BINDINGS.get(one, one) for one in operations}
        names |= {f"k{place}": value for place, value in enumerate(constants)}
        exec(self.source, names)  # names of operations and tensors, numbers, texts: nothing that a file says
        self.bind: Callable[..., tuple[Tensor, ...]] = names["bind"]
        self.run: Callable[..., None] = names["run"]


def body(calls: Sequence[Call], results: set[str] | None = None) -> tuple[list[str], set[str]]:
    """The lines that make the calls, and what they read; each result ends after the last call that reads it.

    Args:
        results: what is read after them.
    """
    lines: list[str] = []
    later = set(results or ())
    for call in reversed(calls):
        if new := _lines(call, later):
            lines += reversed(new)
            later |= call.reads
    return lines[::-1], later


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


def _indented(lines: Sequence[str]) -> str:
    return "\n    ".join(lines)


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _name(operation: OpOverload) -> str:
    return str(operation).replace(".", "_")

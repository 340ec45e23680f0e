"""A step as the list of its operations, noted below vmap and autograd, and that list as a function: compiled source.

PyTorch looks at every argument of a call of `torch.ops`, so most operations are called by its Python bindings, such as
`torch.mul`: 1 us less for each of some 30 in a step in lanes, 4 % of a step of ten small perceptrons.
"""

import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

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
        arguments = [*filter(None, (batch, ", ".join(kept), rates))]
        values = "".join(f"{name}, " for name in kept)
        self.source = (
            f"def bind({state}):\n    {_indented([*made, f'return ({values})'])}\n"
            f"def run({', '.join(arguments)}):\n    {_indented([*lines, 'return None'])}"
        )
        operations = dict.fromkeys(call.operation for call in (*views, *calls))
        names: dict[str, Any] = {
            _name(operation): PYTHON_BINDINGS.get(operation, operation) for operation in operations
        }
        names |= {f"k{place}": value for place, value in enumerate(constants)}
        # Names of operations and tensors, numbers, texts: nothing that a file says. Compiled first: `python -m` ends
        # by SIGINT, whatever its exit code, if ever an interrupt came while a string was run.
        exec(compile(self.source, "<traced step>", "exec"), names)
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


def _name(operation: OpOverload) -> str:
    return str(operation).replace(".", "_")


_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LSTM = _aten.mkldnn_rnn_layer.default  # keeps less where nobody asks for gradients, as in a replayed step
_FRESH = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}  # of `torch.tensor(values)`
_DESCENT = _aten._foreach_sub_.List


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of the step that is taken inside it.

    Views that change nothing are left out, views of the state are made once a pass, and what nobody reads is not
    computed.

    Args:
        batch: the tensors of the batch, which will be others in the next step.
        state: all other tensors that a step reads or changes, which will be others in the next pass.

    Attributes:
        elsewhere: a tensor that the step has read from somewhere else; None if there was none.
        possible: whether the list can be run again.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave PyTorch's compiler out of it, whose import takes a second of processor time."""
        return False

    def __init__(self, batch: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.possible = True
        self.elsewhere: Tensor | None = None
        self._sizes = len(batch), len(state)
        self._names = WeakIdKeyDictionary({tensor: f"b{place}" for place, tensor in enumerate(batch)})
        self._names.update({tensor: f"s{place}" for place, tensor in reversed([*enumerate(state)])})
        self._bases: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # of views that are noted
        self._views: list[Call] = []
        self._calls: list[Call] = []
        self._constants: list[Any] = []
        self._count = self._rates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FRESH:
            self._names[result] = self._constant(result.clone())
        elif not isinstance(func, OpOverload) or _looks(func, args) or not _of_tensors(result):
            self.possible = False
        elif not (func.is_view or func is _aten._unsafe_view.default) or not self._is_same_as_a_base(args[0], result):
            self._note(func, args, kwargs or {}, result)
        return result

    def program(self) -> Program:
        """The list as a function of batch, state and learning rates."""
        return Program(self._views, self._calls, self._constants, *self._sizes, self._rates)

    def _is_same_as_a_base(self, base: Tensor, result: Any) -> bool:
        """Whether a view is laid out as what it is a view of, or as one of its bases: `x.t().t()` is `x`."""
        views = [result] if isinstance(result, Tensor) else result
        candidate: Tensor | None = base
        while views is not result and candidate is not None:
            if _layout(candidate) == _layout(result):
                self._names[result] = self._name(candidate)
                return True
            candidate = self._bases.get(candidate)
        self._bases.update((view, base) for view in views)
        return False

    def _note(self, operation: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        reads: set[str] = set()
        texts = [self._text(argument, reads) for argument in args]
        if operation is _DESCENT and "alpha" in kwargs:  # the learning rate, which may be another in the next pass
            kwargs = {name: value for name, value in kwargs.items() if name != "alpha"}
            texts.append(f"alpha=n{self._rates}")
            self._rates += 1
        texts += [f"{name}={self._text(argument, reads)}" for name, argument in kwargs.items()]
        of_state = operation.is_view and self._name(args[0])[0] in "svk"
        several, kind = isinstance(result, (list, tuple)), "v" if of_state else "r"
        results = [self._result(argument, kind) for argument in result] if several else self._result(result, kind)
        (self._views if of_state else self._calls).append(Call(results, operation, ", ".join(texts), reads))

    def _text(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(item, reads) for item in value)}]"
        if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        name = self._name(value) if isinstance(value, Tensor) else self._constant(value)
        reads.add(name)
        return name

    def _name(self, tensor: Tensor) -> str:
        if tensor not in self._names:
            self.elsewhere = tensor if self.elsewhere is None else self.elsewhere
            self._names[tensor] = self._constant(tensor)
        return str(self._names[tensor])

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"k{len(self._constants) - 1}"

    def _result(self, value: Tensor | None, kind: str) -> str:
        if value is None:
            return "_"
        if value not in self._names:  # else changed in place
            self._names[value] = f"{kind}{self._count}"
            self._count += 1
        return str(self._names[value])


def _looks(operation: OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operation looks at values, so that the list may be another one next time, or at what is around it."""
    if operation is _aten.index.Tensor:  # by a mask it does, by places it does not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation is _LSTM or bool(_LOOKS & set(operation.tags))


def _of_tensors(result: Any) -> bool:
    several = result if isinstance(result, (list, tuple)) else [result]
    return all(item is None or isinstance(item, Tensor) for item in several)


def _layout(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())

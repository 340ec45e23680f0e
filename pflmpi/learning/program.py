"""Recording of a step's operations below vmap and autograd, and their compilation to a Python function.

Calls through `torch.ops` inspect every argument, so the frequent operations are called by their Python bindings, such
as `torch.mul`: 1 us less for each of some 30 in a step in lanes, 4 % of a step of ten small perceptrons.
"""

import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    """An operation: names of its results, source text of its arguments, names that these read."""

    results: str | list[str]
    operation: OpOverload
    arguments: str
    reads: set[str]


class Program:
    """A step's operations as a function of a batch, of the state that they read and change, and of learning rates.

    Args:
        views: calls that make views of the state, once for all steps of a pass.
        calls: of the step.
        constants: the other values that calls read, named k0, k1, ...
        num_batch, num_state, num_rates: tensors of a batch, named b0, ..., of the state, s0, ..., and rates n0, ...

    Attributes:
        source: the compiled source; the same for equal steps.
        bind: from the state to the tensors that `run` takes of it, once per pass.
        run: from the batch, these tensors and the rates; runs the step in place.
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
        step_lines, names_read = _write_lines(calls, set())
        bind_lines, _ = _write_lines(views, names_read)
        bound = sorted(name for name in names_read if name[0] in "sv")  # the state's tensors and views of it
        state, batch, rates = (
            [f"{letter}{index}" for index in range(count)]
            for letter, count in (("s", num_state), ("b", num_batch), ("n", num_rates))
        )
        values = "".join(f"{name}, " for name in bound)
        self.source = (
            f"def bind({', '.join(state)}):\n    {_indent([*bind_lines, f'return ({values})'])}\n"
            f"def run({', '.join([*batch, *bound, *rates])}):\n    {_indent([*step_lines, 'return None'])}"
        )
        operations = dict.fromkeys(call.operation for call in (*views, *calls))
        names: dict[str, Any] = {
            _function_name(operation): PYTHON_BINDINGS.get(operation, operation) for operation in operations
        }
        names |= {f"k{index}": value for index, value in enumerate(constants)}
        # The source has names of operations and tensors, numbers and strings only, nothing from a file. It is compiled
        # first: if an interrupt arrives while a string is executed, `python -m` ends by SIGINT whatever its exit code.
        exec(compile(self.source, "<traced step>", "exec"), names)
        self.bind: Callable[..., tuple[Tensor, ...]] = names["bind"]
        self.run: Callable[..., None] = names["run"]


def _write_lines(calls: Sequence[Call], read_later: set[str]) -> tuple[list[str], set[str]]:
    """The source lines of calls, and the names that these and later code read.

    Calls whose results are not read are left out; each result is deleted after the last call that reads it.
    """
    lines: list[str] = []
    read_later = set(read_later)
    for call in reversed(calls):
        if call_lines := _write_call(call, read_later):
            lines += reversed(call_lines)
            read_later |= call.reads
    return lines[::-1], read_later


def _write_call(call: Call, read_later: set[str]) -> list[str]:
    """The source lines of a call; none if it changes nothing and its results are not read later."""
    results = [call.results] if isinstance(call.results, str) else call.results
    is_read = not read_later.isdisjoint(results)
    if not is_read and not _has_effect(call.operation):
        return []
    text = f"{_function_name(call.operation)}({call.arguments})"
    if is_read:
        targets = [name if name in read_later else "_" for name in results]
        text = f"{', '.join(targets)}{'' if isinstance(call.results, str) else ','} = {text}"
    last_read = sorted(name for name in call.reads - read_later - set(results) if name.startswith("r"))
    return [text, *([f"del {', '.join(last_read)}"] if last_read else [])]


def _indent(lines: Sequence[str]) -> str:
    return "\n    ".join(lines)


@cache
def _has_effect(operation: OpOverload) -> bool:
    return bool(operation._schema.is_mutable) or torch.Tag.nondeterministic_seeded in operation.tags


@cache
def _function_name(operation: OpOverload) -> str:
    return str(operation).replace(".", "_")


_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LSTM = _aten.mkldnn_rnn_layer.default  # saves less when no gradient is needed, as in a replayed step
_FRESH = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}  # of `torch.tensor(values)`
_DESCENT = _aten._foreach_sub_.List


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of the step that is taken inside it.

    Views that change nothing are left out, and views of the state are made once a pass.

    Args:
        batch: the tensors of the batch, others in the next step.
        state: all other tensors that a step reads or changes, others in the next pass.

    Attributes:
        outside_tensor: a tensor that the step has read and that is in neither of them; None if there was none.
        possible: whether the operations can be run again.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoids importing PyTorch's compiler, which takes a second of processor time."""
        return False

    def __init__(self, batch: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.possible = True
        self.outside_tensor: Tensor | None = None
        self._sizes = len(batch), len(state)
        self._names: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._names.update({tensor: f"b{index}" for index, tensor in enumerate(batch)})
        # The first index of a tensor that the state has twice.
        self._names.update({tensor: f"s{index}" for index, tensor in reversed([*enumerate(state)])})
        self._bases: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # of the recorded views
        self._views: list[Call] = []
        self._calls: list[Call] = []
        self._constants: list[Any] = []
        self._num_results = self._num_rates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FRESH:
            self._names[result] = self._add_constant(result.clone())
        elif not isinstance(func, OpOverload) or _is_value_dependent(func, args) or not _has_only_tensors(result):
            self.possible = False
        elif not (func.is_view or func is _aten._unsafe_view.default) or not self._is_unchanged_view(args[0], result):
            self._record(func, args, kwargs or {}, result)
        return result

    def program(self) -> Program:
        """The recorded operations as a function of batch, state and learning rates."""
        return Program(self._views, self._calls, self._constants, *self._sizes, self._num_rates)

    def _is_unchanged_view(self, base: Tensor, result: Any) -> bool:
        """Whether a view has the layout of its base, or of a base of that: `x.t().t()` is `x`."""
        views = [result] if isinstance(result, Tensor) else result
        candidate: Tensor | None = base
        while views is not result and candidate is not None:
            if _layout(candidate) == _layout(result):
                self._names[result] = self._name(candidate)
                return True
            candidate = self._bases.get(candidate)
        self._bases.update((view, base) for view in views)
        return False

    def _record(self, operation: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        reads: set[str] = set()
        texts = [self._write_argument(argument, reads) for argument in args]
        if operation is _DESCENT and "alpha" in kwargs:  # the learning rate, which may differ in the next pass
            kwargs = {name: value for name, value in kwargs.items() if name != "alpha"}
            texts.append(f"alpha=n{self._num_rates}")
            self._num_rates += 1
        texts += [f"{name}={self._write_argument(argument, reads)}" for name, argument in kwargs.items()]
        is_state_view = operation.is_view and self._name(args[0])[0] in "svk"
        letter = "v" if is_state_view else "r"
        if isinstance(result, (list, tuple)):
            results: str | list[str] = [self._name_result(item, letter) for item in result]
        else:
            results = self._name_result(result, letter)
        (self._views if is_state_view else self._calls).append(Call(results, operation, ", ".join(texts), reads))

    def _write_argument(self, value: Any, reads: set[str]) -> str:
        """The source text of an argument; adds the names in it to `reads`."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._write_argument(item, reads) for item in value)}]"
        if value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        name = self._name(value) if isinstance(value, Tensor) else self._add_constant(value)
        reads.add(name)
        return name

    def _name(self, tensor: Tensor) -> str:
        name = self._names.get(tensor)
        if name is None:
            self.outside_tensor = tensor if self.outside_tensor is None else self.outside_tensor
            name = self._names[tensor] = self._add_constant(tensor)
        return name

    def _add_constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"k{len(self._constants) - 1}"

    def _name_result(self, value: Tensor | None, letter: str) -> str:
        if value is None:
            return "_"
        name = self._names.get(value)
        if name is None:  # else it was changed in place
            name = self._names[value] = f"{letter}{self._num_results}"
            self._num_results += 1
        return name


def _is_value_dependent(operation: OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operation may differ next time: it depends on values, or on whether gradients are needed."""
    if operation is _aten.index.Tensor:  # by a mask it depends on values, by indices it does not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operation is _LSTM or not _VALUE_DEPENDENT.isdisjoint(operation.tags)


def _has_only_tensors(result: Any) -> bool:
    items = result if isinstance(result, (list, tuple)) else [result]
    return all(item is None or isinstance(item, Tensor) for item in items)


def _layout(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())

"""A step as the list of its operations, noted below vmap and autograd."""

import math
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pflmpi.learning.program import Call, Program

_aten = torch.ops.aten
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
        self._names = WeakIdKeyDictionary({one: f"b{place}" for place, one in enumerate(batch)})
        self._names.update({one: f"s{place}" for place, one in reversed([*enumerate(state)])})
        self._bases: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # of views that are noted
        self._views: list[Call] = []
        self._calls: list[Call] = []
        self._constants: list[Any] = []
        self._count = self._rates = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it."""
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
        texts = [self._text(one, reads) for one in args]
        if operation is _DESCENT and "alpha" in kwargs:  # the learning rate, which may be another in the next pass
            kwargs = {name: value for name, value in kwargs.items() if name != "alpha"}
            texts.append(f"alpha=n{self._rates}")
            self._rates += 1
        texts += [f"{name}={self._text(one, reads)}" for name, one in kwargs.items()]
        of_state = operation.is_view and self._name(args[0])[0] in "svk"
        several, kind = isinstance(result, (list, tuple)), "v" if of_state else "r"
        results = [self._result(one, kind) for one in result] if several else self._result(result, kind)
        (self._views if of_state else self._calls).append(Call(results, operation, ", ".join(texts), reads))

    def _text(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(one, reads) for one in value)}]"
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
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return operation is _LSTM or bool(_LOOKS & set(operation.tags))


def _of_tensors(result: Any) -> bool:
    several = result if isinstance(result, (list, tuple)) else [result]
    return all(one is None or isinstance(one, Tensor) for one in several)


def _layout(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())

"""A step as the list of its operations, noted below vmap and autograd."""

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pflmpi.learning.program import Call, Program, compile_calls

_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default  # keeps less where nobody asks for gradients, as in a replayed step
_INDEX, _UNSAFE_VIEW = torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_view.default


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of the step that is taken inside it.

    Views that change nothing are left out, views of kept tensors are kept, and what nobody reads is not computed.

    Args:
        batch: the tensors of the batch, which will be others in the next step.

    Attributes:
        kept: the other tensors from outside, views of them, and all values that are neither integers nor texts.
        possible: whether the list can be run again.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave PyTorch's compiler out of it, whose import takes a second of processor time."""
        return False

    def __init__(self, batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []
        self.possible = True
        self._num_batch = len(batch)
        self._names = WeakIdKeyDictionary({one: f"b{place}" for place, one in enumerate(batch)})
        self._bases: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # of views that are noted
        self._calls: list[Call] = []
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload) or _looks(func, args) or not _of_tensors(result):
            self.possible = False
        elif not (func.is_view or func is _UNSAFE_VIEW) or not self._is_known_view(func, args[0], result):
            self._note(func, args, kwargs or {}, result)
        return result

    def program(self) -> Program:
        """The list as a function of the batch's tensors and `kept`."""
        return compile_calls(self._calls, self._num_batch, len(self.kept))

    def _is_known_view(self, operation: OpOverload, base: Tensor, result: Any) -> bool:
        of, views = self._name(base), [result] if isinstance(result, Tensor) else result
        if views is not result and (same_as := self._base_of_layout(base, _layout(result))) is not None:
            self._names[result] = self._name(same_as)
        elif of.startswith("k") and operation.is_view:
            for view in views:
                self._names[view] = self._keep(view.detach())
        else:
            self._bases.update((view, base) for view in views)
            return False
        return True

    def _base_of_layout(self, view: Tensor, layout: Hashable) -> Tensor | None:
        """The nearest of a view and its bases with a layout, or None: `x.t().t()` is `x`."""
        base: Tensor | None = view
        while base is not None and _layout(base) != layout:
            base = self._bases.get(base)
        return base

    def _note(self, operation: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        reads: set[str] = set()
        texts = [self._text(one, reads) for one in args]
        texts += [f"{name}={self._text(one, reads)}" for name, one in kwargs.items()]
        several = isinstance(result, (list, tuple))
        results = [self._result(one) for one in result] if several else self._result(result)
        self._calls.append(Call(results, operation, ", ".join(texts), reads))

    def _text(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(one, reads) for one in value)}]"
        if value is None or isinstance(value, (int, str)):
            return repr(value)
        name = self._name(value) if isinstance(value, Tensor) else self._keep(value)
        reads.add(name)
        return name

    def _name(self, tensor: Tensor) -> str:
        if tensor not in self._names:
            self._names[tensor] = self._keep(tensor.detach())
        return str(self._names[tensor])

    def _keep(self, value: Any) -> str:
        self.kept.append(value)
        return f"k{len(self.kept) - 1}"

    def _result(self, value: Tensor | None) -> str:
        if value is None:
            return "_"
        if value not in self._names:  # else changed in place
            self._names[value] = f"r{self._count}"
            self._count += 1
        return str(self._names[value])


def _looks(operation: OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operation looks at values, so that the list may be another one next time, or at what is around it."""
    if operation is _INDEX:  # by a mask it does, by places it does not
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return operation is _LSTM or bool(_LOOKS & set(operation.tags))


def _of_tensors(result: Any) -> bool:
    several = result if isinstance(result, (list, tuple)) else [result]
    return all(one is None or isinstance(one, Tensor) for one in several)


def _layout(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())


def same(kept: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the numbers are equal and the tensors are the same ones, not only equal ones."""
    return len(kept) == len(others) and all(map(_same, kept, others))


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(type(one) is type(other) and one == other)
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and _layout(one) == _layout(other)

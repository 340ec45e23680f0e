"""Training steps that are traced once in a run and replayed: the same operations without Python's overhead.

In each step Python calls the loss, `vmap` turns its operations into those of all lanes, and autograd records them and
walks back; yet what reaches the device is the same list of operations in every step. A step is a function of the batch
and of state that stays in place during a pass. So the first steps of a kind are traced as that list, and later ones, in
this pass and in others, run it on their own batch and state: the same operations in the same order, so the same bits.

Two steps of a kind must give the same list. A step that looks at values (`item`, a size that depends on data) is never
replayed. A step that reads any other tensor is refused: the next pass would read the tensor of this one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from pflmpi.learning.client import StepBatch
from pflmpi.learning.cuda_graphs import StaticBuffers, capture_on, warn_not_captured
from pflmpi.learning.program import Program, Recording
from pflmpi.tree import ALIGNED
from pflmpi.vmap_lanes import behind, in_lane, lane_axis, of_all_lanes, outside_vmap

_enabled = True


@dataclass
class _Trace:
    """The traced steps of one kind."""

    program: Program | None = None  # the operations; None before the first step, and where it cannot be replayed
    confirmed: bool = False  # whether a second step had the same operations
    possible: bool = True  # whether the step can be replayed

    def add(self, recording: Recording) -> bool:
        """Keeps a recorded step, to be replayed once a second one equals it; returns whether that is possible."""
        previous, self.program = self.program, recording.program() if recording.possible else None
        self.confirmed = previous is not None and self.program is not None and previous.source == self.program.source
        self.possible = self.confirmed or (previous is None and self.program is not None)
        return self.possible


@lru_cache(maxsize=2048)
def _traces(kind: Hashable) -> dict[Hashable, _Trace]:
    """The traces of a kind of training in this run, by the form of a batch."""
    return defaultdict(_Trace)


@lru_cache(maxsize=32)  # each has memory of its own: one per training of each architecture
def _static_buffers(kind: Hashable) -> StaticBuffers:
    """The buffers of a kind of training in this run."""
    return StaticBuffers()


class Steps:
    """Takes the steps of a pass, most of them by replaying a traced one.

    Args:
        step: takes one step in place.
        kind: steps of one kind, with state and batches of one layout, are the same operations; None: unknown, so that
            no step is replayed.
        state: all tensors that a step reads or changes besides the batch; they stay in place during the pass.
        num_changed: how many of them, from the first on, a step may change.
        rates: learning rates that the step takes as numbers.
    """

    def __init__(
        self,
        step: Callable[[StepBatch], None],
        kind: Hashable,
        state: Sequence[Tensor],
        num_changed: int,
        rates: tuple[float, ...],
    ) -> None:
        self._step, self._rates, self._num_changed = step, rates, num_changed
        self._kind: Hashable = None
        if kind is not None and _enabled:
            self._state, layout = _unwrap_lanes(state)
            self._kind = kind, layout, tuple(map(_misalignment, self._state))
        self._traces = _traces(self._kind)  # looked up once a pass, since the key takes long to hash
        self._bound: dict[Program, tuple[Tensor, ...]] = {}
        self._static: StaticBuffers | None = None

    def take(self, batch: StepBatch) -> None:
        """Takes one step; the state may lag behind captured steps until `end`."""
        if self._kind is None:
            return self._step(batch)
        inputs, form = _inputs_and_form(batch)
        trace = self._traces[form]
        if trace.confirmed and trace.program is not None:
            with outside_vmap(), torch.no_grad():
                return self._run(trace.program, inputs)
        self._put_back()
        if not trace.possible:
            return self._step(batch)
        with Recording(inputs, self._state) as recording:
            self._step(batch)
        if recording.possible and recording.outside_tensor is not None:
            raise ReadsElsewhere(recording.outside_tensor)
        if not trace.add(recording) and capture_on(inputs[0].device):
            warn_not_captured("it looks at values, or is another one each time")
        return None

    def end(self) -> None:
        """Brings the state up to date with all steps."""
        self._put_back()

    def _run(self, program: Program, batch: list[Tensor]) -> None:
        capture = capture_on(batch[0].device)
        if capture is not None:
            if self._static is None:
                self._static = _static_buffers(self._kind)
                self._static.abandon()  # of an earlier pass that ended with an error
            if self._static.run(program, batch, self._state, self._num_changed, capture):
                return
        bound = self._bound.get(program)
        if bound is None:
            bound = self._bound[program] = program.bind(*self._state)
        program.run(*batch, *bound, *self._rates)

    def _put_back(self) -> None:
        if self._static is not None:
            with outside_vmap(), torch.no_grad():
                self._static.put_back()


class ReadsElsewhere(Exception):
    """A step has read a tensor that is neither in its state nor in its batch."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor


def clear_traces() -> None:
    """Clears all traces: the code that a loss calls may have changed since an earlier run in this process."""
    _traces.cache_clear()
    _static_buffers.cache_clear()


@contextmanager
def without_replay() -> Iterator[None]:
    """Disables replaying, to compare results with and without it."""
    global _enabled
    _enabled = False
    try:
        yield
    finally:
        _enabled = True


def _inputs_and_form(batch: StepBatch) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, and a key of their layout and of the settings that a step depends on."""
    tensors, settings = list[Tensor | None](), list[Hashable]()
    for minibatch in batch if isinstance(batch, tuple) else (batch,):
        padding = minibatch.padding
        tensors += [minibatch.x, minibatch.y, minibatch.key]
        if padding is not None:
            tensors += [padding.weight, padding.share, padding.target, padding.active]
        settings.append(minibatch.smoothing)
    inputs, layout = _unwrap_lanes(tensors)
    return inputs, (layout, *settings)


def _unwrap_lanes(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Hashable]:
    """The tensors, in vmap those of all lanes, and a key of their layout and of which of them are identical."""
    unwrapped: list[Tensor] = []
    layout: list[Hashable] = []
    first: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            layout.append(None)
            continue
        axis = -1
        if in_lane(tensor):
            axis, tensor = lane_axis(tensor), behind(tensor)
        layout.append((tensor.dtype, tensor.shape, tensor.stride(), axis, first.setdefault(id(tensor), len(unwrapped))))
        unwrapped.append(tensor)
    return unwrapped, tuple(layout)


def _misalignment(tensor: Tensor) -> int:
    """Offset of a tensor in bytes modulo the alignment by which a GPU's kernels are chosen; 0 on a CPU."""
    return 0 if tensor.is_cpu else int(tensor.storage_offset()) * tensor.element_size() % ALIGNED


_VALUES = (bool, int, float, str, bytes, type, Enum, CodeType, BaseModel, torch.dtype, torch.device, type(None))
_UNKNOWN = object()
_MAX_DEPTH = 12


def function_key(function: Callable[..., Any]) -> Hashable:
    """Key of a function: its code and the values that it closes over, but for tensors; None if unknown.

    >>> def times(factor):
    ...     return lambda x: factor * x
    >>> function_key(times(2)) == function_key(times(2)) != function_key(times(3))
    True
    """
    parts = [(path, type(value), value) for path, value in _walk(function, "", 0) if not isinstance(value, Tensor)]
    return None if any(value is _UNKNOWN for _, _, value in parts) else tuple(parts)


def find_tensor_name(tensor: Tensor, function: Callable[..., Any]) -> str:
    """The name by which a function closes over a tensor, found by its memory; "" if it does not."""
    memory = tensor.untyped_storage()._cdata
    closed_over = ((path, value) for path, value in _walk(function, "", 0) if isinstance(value, Tensor))
    return next((path for path, value in closed_over if of_all_lanes(value).untyped_storage()._cdata == memory), "")


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that a value consists of."""
    if isinstance(value, (*_VALUES, Tensor)):
        yield path, value
        return
    parts: dict[str, Any] | None = None
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
        parts = {"code": value.__code__, **defaults, **{name: cell.cell_contents for name, cell in cells}}
    elif isinstance(value, MethodType):
        parts = {"function": value.__func__, "self": value.__self__}
    elif isinstance(value, Mapping):
        parts = {str(key): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {str(index): item for index, item in enumerate(value)}
    elif is_dataclass(value):
        parts = {item.name: getattr(value, item.name) for item in fields(value) if item.compare}
    if parts is None or depth == _MAX_DEPTH:
        yield path, _UNKNOWN
        return
    yield path, type(value)
    for name, item in parts.items():
        yield from _walk(item, f"{path}.{name}" if path else name, depth + 1)

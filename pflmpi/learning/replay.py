"""Steps of training, traced once in a run and replayed: the same operations without what finds them.

A step of SGD is found anew each time: Python calls the loss, `vmap` turns its operations into those for all lanes,
autograd notes them and walks back. What reaches the device is the same list of operations step after step. A step is a
function of the batch and of the state that stays in place during a pass. So the first one of its kind is traced as that
list, and those that follow, in this pass and in later ones, run it on their own batch and state: the same operations in
the same order, so the same bits.

Two steps of a kind must give the same list. A step that looks at values (`item`, a size that depends on data) is never
replayed. One that reads a tensor from elsewhere is refused: the next pass would read the tensor of this one.
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
from pflmpi.learning.cuda_graphs import StaticBuffers, capture_on, say_why_not
from pflmpi.learning.program import Program, Recording
from pflmpi.tree import ALIGNED
from pflmpi.vmap_lanes import behind, in_lane, lane_axis, of_all_lanes, outside_vmap

_replays = True


@dataclass
class _Traced:
    """A kind of step."""

    program: Program | None = None  # its operations; None before the first step, and where it cannot be replayed
    agreed: bool = False  # whether a second step had the same ones
    possible: bool = True  # whether it can be replayed

    def note(self, recording: Recording) -> bool:
        """Takes a traced step as the one to replay, once a second one is like it; whether that may be."""
        before, self.program = self.program, recording.program() if recording.possible else None
        self.agreed = before is not None and self.program is not None and before.source == self.program.source
        self.possible = self.agreed or (before is None and self.program is not None)
        return self.possible


@lru_cache(maxsize=2048)
def _traced(kind: Hashable) -> dict[Hashable, _Traced]:
    """The traced steps of a kind of training in this run, by the form of a batch."""
    return defaultdict(_Traced)


@lru_cache(maxsize=32)  # they have memory of their own: one for each training of each architecture
def _static(kind: Hashable) -> StaticBuffers:
    """The buffers of a kind of training in this run."""
    return StaticBuffers()


class Steps:
    """Takes the steps of a pass, most of them by replaying one.

    Args:
        step: takes one step in place.
        kind: steps of one kind, with state and batches of one layout, are the same operations; None: nothing is known,
            so that each step is taken as it is.
        state: all tensors that a step reads or changes, but for the batch; they stay in place during the pass.
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
        if kind is not None and _replays:
            self._state, layout = _behind_lanes(state)
            self._kind = kind, layout, tuple(map(_begin, self._state))
        self._traced = _traced(self._kind)  # looked up once a pass, since the key takes long to hash
        self._bound: dict[Program, tuple[Tensor, ...]] = {}
        self._static: StaticBuffers | None = None

    def take(self, batch: StepBatch) -> None:
        if self._kind is None:
            return self._step(batch)
        tensors, settings = list[Tensor | None](), list[Hashable]()
        for minibatch in batch if isinstance(batch, tuple) else (batch,):
            padding = minibatch.padding
            tensors += [minibatch.x, minibatch.y, minibatch.key]
            if padding is not None:
                tensors += [padding.weight, padding.share, padding.target, padding.active]
            settings += [padding is not None and padding.full, minibatch.smoothing]
        inputs, layout = _behind_lanes(tensors)
        form = layout, *settings
        traced = self._traced[form]
        if traced.agreed and traced.program is not None:
            with outside_vmap(), torch.no_grad():
                return self._run(traced.program, inputs)
        self._put_back()
        if not traced.possible:
            return self._step(batch)
        with Recording(inputs, self._state) as recording:
            self._step(batch)
        if recording.possible and recording.elsewhere is not None:
            raise ReadsElsewhere(recording.elsewhere)
        if not traced.note(recording) and capture_on(inputs[0].device):
            say_why_not("it looks at values, or is another one each time")
        return None

    def end(self) -> None:
        """Leave to the state what the steps have made of it; `take` may be late with that."""
        self._put_back()

    def _run(self, program: Program, batch: list[Tensor]) -> None:
        capture = capture_on(batch[0].device)
        if capture is not None:
            if self._static is None:
                self._static = _static(self._kind)
                self._static.abandon()  # a pass that an error has ended
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


def forget() -> None:
    """Trace every kind of step anew: what a loss calls may have changed since an earlier run in this process."""
    _traced.cache_clear()
    _static.cache_clear()


@contextmanager
def step_by_step() -> Iterator[None]:
    """Replay nothing meanwhile, to see whether that makes a difference."""
    global _replays
    _replays = False
    try:
        yield
    finally:
        _replays = True


def _behind_lanes(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], Hashable]:
    """The tensors, in lanes those of all behind those of one, and what a traced step knows of them.

    That is their layout, and which of them are one and the same.
    """
    behind_lanes: list[Tensor] = []
    layout: list[Hashable] = []
    first: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            layout.append(None)
            continue
        axis = -1
        if in_lane(tensor):
            axis, tensor = lane_axis(tensor), behind(tensor)
        layout.append(
            (tensor.dtype, tensor.shape, tensor.stride(), axis, first.setdefault(id(tensor), len(behind_lanes)))
        )
        behind_lanes.append(tensor)
    return behind_lanes, tuple(layout)


def _begin(tensor: Tensor) -> int:
    """Offset of a tensor in bytes modulo the alignment by which a GPU's kernels are chosen; 0 on a CPU."""
    return 0 if tensor.is_cpu else int(tensor.storage_offset()) * tensor.element_size() % ALIGNED


_VALUES = (bool, int, float, str, bytes, type, Enum, CodeType, BaseModel, torch.dtype, torch.device, type(None))
_UNKNOWN = object()
_DEEPEST = 12


def contents(function: Callable[..., Any]) -> Hashable:
    """Key of a function: its code and the values that it closes over, but for tensors; None if not known.

    >>> def times(factor):
    ...     return lambda x: factor * x
    >>> contents(times(2)) == contents(times(2)) != contents(times(3))
    True
    """
    parts = [(path, type(value), value) for path, value in _walk(function, "", 0) if not isinstance(value, Tensor)]
    return None if any(value is _UNKNOWN for _, _, value in parts) else tuple(parts)


def name_of(tensor: Tensor, function: Callable[..., Any]) -> str:
    """The name of what a function closes over that has the memory of a tensor; "" if there is none."""
    memory = tensor.untyped_storage()._cdata
    inside = ((path, value) for path, value in _walk(function, "", 0) if isinstance(value, Tensor))
    return next((path for path, value in inside if of_all_lanes(value).untyped_storage()._cdata == memory), "")


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that a value is made of."""
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
        parts = {str(place): item for place, item in enumerate(value)}
    elif is_dataclass(value):
        parts = {item.name: getattr(value, item.name) for item in fields(value) if item.compare}
    if parts is None or depth == _DEEPEST:
        yield path, _UNKNOWN
        return
    yield path, type(value)
    for name, item in parts.items():
        yield from _walk(item, f"{path}.{name}" if path else name, depth + 1)

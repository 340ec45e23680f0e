"""The steps of a pass, of which one is recorded and the others replayed: the same operations without what finds them.

A step of SGD is found anew each time: Python calls the loss, `vmap` turns its operations into those for all lanes,
autograd notes them and walks back. What reaches the device is the same list of operations step after step. So one step
is recorded as that list, and those that follow run it with their own batch: the same operations in the same order, so
the same bits.

That holds for a step that depends on its batch and on what stays in place during the pass. It is checked once for each
list: two steps, one after the other, must give the same list, with the same numbers and the same tensors from outside.
A step that looks at values (`item`, a size that depends on data) is never replayed.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pflmpi.learning.capture.graphs import capture_on, say_why_not
from pflmpi.learning.capture.runs import Runs
from pflmpi.learning.client import Batch
from pflmpi.learning.program import Program
from pflmpi.learning.recording import Recording, same
from pflmpi.vmap_lanes import behind, in_lane, lane_axis, outside_vmap

_WORTH = 8  # steps of a pass: to record one takes as long as two or three
_replays = True
_last_pass: dict[Hashable, int] = {}  # how many steps it had, by their kind and the form of their batches


@dataclass
class _Form:
    """What is known of the steps whose batches have one form."""

    program: Program | None = None
    kept: list[Any] = field(default_factory=list)
    taken: int = 0
    recorded: int = 0
    repeats: bool | None = None  # None: not yet known

    def note(self, recording: Recording, kind: Hashable) -> bool:
        """Take a recorded step as the one to replay, once it is known to repeat itself; whether it may do so.

        The first step may make what all of them use. So where the second is not like it, the third decides.
        """
        if not recording.possible:
            self.repeats = False
            return False
        before, program, step = self.program, recording.program(), self.recorded
        alike = before is program and same(self.kept, recording.kept)
        if before is not None and kind is not None:
            before.repeats[kind, step - 1] = alike
        known = None if kind is None else program.repeats.get((kind, step))
        if alike or known:
            self.repeats = True
        elif step == 2 or (step == 1 and known is False):
            self.repeats = False
        self.program, self.kept, self.recorded = program, recording.kept, step + 1
        return self.repeats is not False


class Steps:
    """Takes the steps of a pass, most of them by replaying one.

    Args:
        step: takes one step in place, on tensors that are the same during the pass.
        kind: steps of one kind repeat themselves, or not, whatever they are given; None: that is checked in each pass.
        length: how many steps the pass has.
    """

    def __init__(self, step: Callable[[Batch], None], kind: Hashable, length: int) -> None:
        self._step, self._kind, self._length = step, kind, length
        self._forms: dict[Hashable, _Form] = {}
        self._runs = Runs()

    def take(self, batch: Batch) -> None:
        """Take the step of one batch."""
        if self._length < _WORTH or not _replays:
            return self._step(batch)
        tensors, key = _behind_lanes(batch)
        form = self._forms.setdefault(key, _Form())
        form.taken += 1
        if form.taken == 1 and _last_pass.get((self._kind, key)) == 1:
            form.repeats = False  # it came once, as a smaller last batch does
        if form.repeats and form.program:
            with outside_vmap(), torch.no_grad():
                return self._runs.run(form.program, key, tensors, form.kept)
        self._put_back()
        if form.repeats is False:
            return self._step(batch)
        with Recording(tensors) as recording:
            self._step(batch)
        if not form.note(recording, self._kind) and capture_on(batch.x.device):
            say_why_not("it looks at values, or is another one each time")
        return None

    def end(self) -> None:
        """Leave to what stays in place what the steps have made of it; `take` may be late with that."""
        self._put_back()
        if self._kind is not None:
            _last_pass.update({(self._kind, key): form.taken for key, form in self._forms.items()})

    def _put_back(self) -> None:
        with outside_vmap(), torch.no_grad():
            self._runs.put_back()


@contextmanager
def step_by_step() -> Iterator[None]:
    """Replay nothing meanwhile, to see whether that makes a difference."""
    global _replays
    _replays = False
    try:
        yield
    finally:
        _replays = True


def _behind_lanes(batch: Batch) -> tuple[list[Tensor], Hashable]:
    """The tensors of a batch, in lanes those of all behind those of one, and what a recorded step knows of them."""
    padding = batch.padding
    own = [batch.x, batch.y, batch.key]
    of_lanes = [] if padding is None else [padding.weight, padding.share, padding.target, padding.active]
    tensors: list[Tensor] = []
    key: list[Hashable] = [padding is not None and padding.full]
    for one in (*own, *of_lanes):
        axis = -1
        if one is not None and in_lane(one):
            one, axis = behind(one), lane_axis(one)
        key.append(None if one is None else (one.dtype, one.shape, one.stride(), axis))
        tensors += [] if one is None else [one]
    return tensors, tuple(key)

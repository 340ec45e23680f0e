"""Replayed steps as one launch each: the operations of a step on buffers of its own, captured.

A captured step reads and writes fixed memory. So what is kept from step to step moves into buffers once a pass and back
at its end, the batch moves there before each step, and what was captured is launched. It stays with its program, for
the passes and clients that follow.

Nothing is believed of a capture: the first captured step is also taken as it is, and if one bit differs, or the
capture fails, the log says so once and steps are launched operation by operation.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflmpi.learning.capture.graphs import Capture, capture_on, say_why_not
from pflmpi.learning.capture.memory import Stretch, copy, copy_of, same_bits, stretches
from pflmpi.learning.program import Program

_AFTER = 8  # times that a step is run with the same numbers before it is captured, which takes as long as some of them
_MOST = 4  # layouts of one program whose captures are kept; each has memory of its own


class Runs:
    """Runs the programs of one pass, whose steps keep the same tensors."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use] = {}
        self._loaded: _Captured | None = None

    def run(self, program: Program, form: Hashable, batch: Sequence[Tensor], kept: Sequence[Any]) -> None:
        """Run a program.

        Args:
            form: batches of one form have one program, which keeps the same tensors.
        """
        capture = capture_on(batch[0].device)
        if capture is None:
            return program.run(batch, kept)
        if form not in self._uses:
            self._uses[form] = _use(program, form, kept)
        use = self._uses[form]
        if use.captured is None:
            self.put_back()
            use.runs += 1
            if use.refused or use.runs <= _AFTER:
                return program.run(batch, kept)
            self._loaded = use.captured = _try(program, batch, kept, capture)
            use.refused = use.captured is None
            return None
        if self._loaded is not use.captured:
            self.put_back()
            self._loaded = use.captured
            self._loaded.load(stretches(kept))
        return self._loaded.step(batch)

    def put_back(self) -> None:
        """Give the tensors that are kept the values that captured steps have made of them."""
        if self._loaded is not None:
            self._loaded.put_back()
        self._loaded = None


@dataclass
class _Use:
    """A program on tensors of one layout with the same numbers, which are a part of what is captured."""

    numbers: tuple[Hashable, ...]
    runs: int = 0
    refused: bool = False
    captured: "_Captured | None" = None


def _use(program: Program, form: Hashable, kept: Sequence[Any]) -> _Use:
    numbers = tuple((type(one), one) for one in kept if not isinstance(one, Tensor))
    key = (form, *(stretch.key for stretch in stretches(kept)))
    known: _Use | None = program.uses.pop(key, None)
    if known is None or known.numbers != numbers:
        known = _Use(numbers)
    program.uses[key] = known  # the newest last
    while len(program.uses) > _MOST:
        del program.uses[next(iter(program.uses))]
    return known


class _Captured:
    """A program on buffers of its own."""

    def __init__(self, program: Program, batch: Sequence[Tensor], kept: Sequence[Any], capture: Capture) -> None:
        self._batch = [torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=b.device) for b in batch]
        self._flat, own = copy_of(stretches(kept), kept)
        self._theirs: list[Tensor] = []
        self._launch = capture(lambda: program.run(self._batch, own))

    def load(self, theirs: Sequence[Stretch]) -> None:
        """Go on from what these tensors have; `put_back` gives it back to them."""
        self._theirs = [stretch.flat for stretch in theirs]
        copy(self._flat, self._theirs)

    def step(self, batch: Sequence[Tensor]) -> None:
        """Take the step of a batch."""
        copy(self._batch, batch)
        self._launch()

    def put_back(self) -> None:
        """Give back what was loaded, as the steps since have changed it."""
        copy(self._theirs, self._flat)
        self._theirs = []

    def agrees(self) -> bool:
        """Whether what was loaded has the same bits as the buffers."""
        return same_bits(self._flat, self._theirs)


def _try(program: Program, batch: Sequence[Tensor], kept: Sequence[Any], capture: Capture) -> _Captured | None:
    """Take a step as it is and captured; the capture, loaded, if both have the same bits."""
    captured: _Captured | None = None
    reason = _obstacle(batch, kept)
    if not reason:
        try:
            captured = _Captured(program, batch, kept, capture)
            captured.load(stretches(kept))
            captured.step(batch)
        except RuntimeError as error:  # what torch raises, also for want of memory
            captured, reason = None, str(error).splitlines()[0]
    program.run(batch, kept)
    if captured is not None and not captured.agrees():
        captured, reason = None, "the captured step has other bits"
    if reason:
        say_why_not(reason)
    return captured


def _obstacle(batch: Sequence[Tensor], kept: Sequence[Any]) -> str:
    """Why a step on such tensors cannot be captured; "" if it can be tried."""
    device = batch[0].device
    if any(one.device != device for one in (*batch, *kept) if isinstance(one, Tensor)):
        return "it reads a tensor of the host, whose value would be fixed"
    if any(stride == 0 and size > 1 for one in batch for size, stride in zip(one.shape, one.stride(), strict=True)):
        return "samples of its batch share memory"
    if any(stretch.mixed for stretch in stretches(kept)):
        return "tensors of several types share memory"
    return ""

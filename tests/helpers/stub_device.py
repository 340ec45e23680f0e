"""A device that is not there: its tensors are computed on the host, and every operation on it is seen and counted.

A tensor of the device `stub` wraps one on the host. What a GPU refuses is refused: operands on two devices, NumPy on
what is not on the host. So a run on it has the values of a run on the host, and shows what a GPU would be asked to do.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from counts import Counts

# At import, since PyTorch makes its threads for backward passes when the first one runs.
backend_registration._setup_privateuseone_for_python_backend("stub")
# `torch.utils.checkpoint` asks the device module that is registered, wherever it computes.
torch.stub.get_amp_supported_dtype = lambda: [torch.bfloat16]
DEVICE = torch.device("stub", 0)

_aten = torch.ops.aten
# They read a value or a count that only the device knows, so that the host waits; PyTorch marks most of them.
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_ALSO_WAIT = {_aten.bincount, _aten.unique_dim, _aten.masked_select, _aten.nonzero, _aten.equal, _aten._unique2}
_NO_WORK = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_NO_WORK |= {_aten._unsafe_view, _aten._reshape_alias, _aten.lift_fresh, _aten.alias, _aten.detach}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}


class StubTensor(Tensor):
    """A tensor of the device `stub`; `values` is on the host."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "StubTensor":
        made: StubTensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values = values
        return made

    def __repr__(self) -> str:
        return f"stub {self.values!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the stub device outside of `stub_device`")


class StubDevice(TorchDispatchMode):
    """While it is active there is a device `stub`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.bytes_moved = Counts(), 0  # bytes between host and device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, StubTensor)]
        wanted = kwargs.get("device")
        target = "stub" if ours else "cpu"
        if wanted is not None:
            target = torch.device(wanted).type
        if not ours and target != "stub":
            return func(*args, **kwargs)
        if target == "stub" and wanted is not None:
            kwargs["device"] = torch.device("cpu")
        packet = func.overloadpacket
        if packet not in (_aten._to_copy, _aten.copy_, _aten.copy):
            _refuse_two_devices(func, packet, tensors, ours)
        self._count(func, packet, args, tensors, ours, target)
        out = func(*tree_map_only(StubTensor, _values, args), **tree_map_only(StubTensor, _values, kwargs))
        if target != "stub" or (packet is _aten.copy_ and not isinstance(args[0], StubTensor)):
            return args[0] if packet is _aten.copy_ else out
        out = tree_map_only(Tensor, StubTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if ours else out

    def _count(
        self, func: Any, packet: Any, args: Any, tensors: Sequence[Tensor], ours: Sequence[Tensor], target: str
    ) -> None:
        counts = self.counts
        if packet is _aten._to_copy and (not ours or target != "stub"):
            counts.uploads += not ours
            counts.downloads += bool(ours)
            self.bytes_moved += tensors[0].nbytes
        elif packet is _aten.copy_ and len(ours) < len(tensors):
            counts.uploads += isinstance(args[0], StubTensor)
            counts.downloads += not isinstance(args[0], StubTensor)
            self.bytes_moved += tensors[0].nbytes
        elif packet is _aten._local_scalar_dense or _waits(func, packet, tensors):
            counts.syncs += 1
        elif not func.is_view and packet not in _NO_WORK:
            counts.launches += _launches(func, args)


@contextmanager
def stub_device():
    """A device `stub` to compute on, with what it was asked to do."""
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(values, device=...) is seen
    try:
        with StubDevice() as stub:
            yield stub
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def _values(tensor):
    return tensor.values


def _launches(func, args):
    """One; for operations on lists that CUDA cannot take together, one for each tensor."""
    if not func.__name__.startswith("_foreach"):
        return 1
    lists = [value for value in args if isinstance(value, list | tuple)]
    alike = all(len({(leaf.shape, leaf.stride(), leaf.dtype) for leaf in row}) == 1 for row in zip(*lists, strict=True))
    return 1 if alike else len(lists[0])


def _waits(func, packet, tensors):
    if packet in _INDEXING:  # by booleans: as many results as there are true ones
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors[1:])
    return packet in _ALSO_WAIT or any(tag in func.tags for tag in _WAITS)


def _refuse_two_devices(func, packet, tensors, ours):
    """Raise as CUDA does; single numbers of the host are allowed beside tensors in pointwise operations."""
    for tensor in tensors:
        if isinstance(tensor, StubTensor) or (tensor.ndim == 0 and torch.Tag.pointwise in func.tags):
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {DEVICE} and {tensor.device} in {func}"
        )

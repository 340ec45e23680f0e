"""The device of a rank, chosen as a run chooses it, and tried."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pflmpi.doctor.facts import Device
from pflmpi.errors import ConfigError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import first_line
from pflmpi.transports.detect import Launch

if TYPE_CHECKING:
    import torch


def device(launch: Launch, runtime: RuntimeConfig, training: TrainingConfig, environ: Mapping[str, str]) -> Device:
    """Return the device of this rank; what torch cannot do becomes its `error`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch

        from pflmpi.runtime import devices
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries is missing
        return Device(visible=visible, error=f"torch cannot be imported ({first_line(error)})")
    logging.getLogger("pflmpi.runtime.devices").setLevel(logging.ERROR)  # what it warns of is judged later
    found: dict[str, Any]
    try:
        chosen = devices.choose(runtime, training, launch)
        found = {"name": "CPU"} if chosen.type == "cpu" else gpu(chosen)
    except ConfigError as error:
        found = {"error": str(error)}
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        found = {"error": f"the GPU cannot be used ({first_line(error)})"}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Device(visible=visible, gpus=gpus, gloo=_gloo(), nccl=_nccl(), **found)


def gpu(chosen: "torch.device") -> dict[str, Any]:
    """Return what a GPU is; asking for its memory starts it, so that one that cannot be used is noticed."""
    import torch

    free, total = torch.cuda.mem_get_info(chosen)
    properties = torch.cuda.get_device_properties(chosen)
    return {"name": properties.name, "uuid": str(properties.uuid), "memory": total, "memory_free": free}


def _gloo() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def _nccl() -> str:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

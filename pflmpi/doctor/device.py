"""What torch can use, and the device that a run would give a rank, tried."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pflmpi import machine
from pflmpi.doctor.facts import Device
from pflmpi.errors import PflmpiError, RunError
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.text import first_line
from pflmpi.transports.peers import Peer

if TYPE_CHECKING:
    import torch

    from pflmpi.config.load import Config


def torch_facts(environ: Mapping[str, str]) -> Device:
    """What torch can use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries is missing
        return Device(visible=visible, error=f"torch cannot be imported ({first_line(error)})")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = torch.distributed
    gloo = backends.is_available() and backends.is_gloo_available()
    nccl = backends.is_available() and backends.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""  # type: ignore[no-untyped-call]
    return Device(visible=visible, gpus=gpus, gloo=gloo, nccl=version)


def seen_gpus(config: "Config | None", environ: Mapping[str, str]) -> tuple[machine.Gpu, ...]:
    """The GPUs that this rank sees and may use; none where torch or the driver fails, which `try_device` says."""
    try:
        return () if config and config.runtime.device == "cpu" else machine.gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    except (RunError, ImportError, OSError):
        return ()


def try_device(
    found: Device, peers: Sequence[Peer], rank: int, config: "Config | None", transport: str = "inprocess"
) -> Device:
    """The device that a run would give this rank, tried.

    Args:
        found: what torch has.
        peers: all ranks.
        rank: this one.
        config: the configuration, if there is one.
        transport: the name of that to the other ranks.
    """
    if found.error:
        return found
    from pflmpi.runtime.devices import device_of, place
    from pflmpi.runtime.exchange.gpu_messages import gpu_messages

    runtime, training = (config.runtime, config.training) if config else (RuntimeConfig(), TrainingConfig())
    about: dict[str, Any] = {"name": "CPU"}
    try:
        if runtime.device != "cpu":
            machine.gpus(found.visible)  # to have its error
        placed = place(peers, runtime, training)
        if placed.number[rank] is not None:
            about = gpu(device_of(placed, rank))
        about["messages"] = gpu_messages(placed, transport).text
    except PflmpiError as error:
        about = {"error": str(error)}
    except RuntimeError as error:  # what torch raises for a GPU that is taken, lost, or too new for it
        about = {"error": f"the GPU cannot be used ({first_line(error)})"}
    return found.model_copy(update=about)


def gpu(chosen: "torch.device") -> dict[str, Any]:
    """What a GPU is; asking for its memory starts it, which fails where it cannot be used."""
    import torch

    free, total = torch.cuda.mem_get_info(chosen)
    properties = torch.cuda.get_device_properties(chosen)
    return {"name": properties.name, "uuid": str(properties.uuid), "memory": total, "memory_free": free}

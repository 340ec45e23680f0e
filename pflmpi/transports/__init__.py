"""Transports between ranks, behind one interface: in one process, over MPI, or over torch.distributed."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn

from pflmpi.errors import ConfigError
from pflmpi.transports.base import Transport, exit_unconnected
from pflmpi.transports.detect import LAUNCHERS, Launch
from pflmpi.transports.inprocess import InProcessTransport
from pflmpi.transports.peers import Peer
from pflmpi.transports.waiting import describe_error

Name = Literal["auto", "inprocess", "mpi", "torch"]

_FOR_TORCH = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
_INSTALL_MPI = (
    "pip install 'pflmpi[mpi]' brings both, a cluster has them as modules; or set runtime.transport = 'torch'"
)


def open_transport(
    name: Name,
    launch: Launch,
    timeout: float,
    late: Callable[[str], NoReturn] | None = None,
) -> Transport:
    """Opens a transport and connects it to all other ranks.

    Args:
        name: "auto" chooses by the launch.
        timeout: seconds that a call waits for the other ranks.
        late: called with an error text if MPI does not start in time; must end this process, because MPI_Init blocks.

    Raises:
        ConfigError: the transport does not fit how the run was started, or a library is missing.
        TransportError: not all ranks arrived within the time limit.
    """
    if name == "auto":
        name = "mpi" if launch.kind == "mpi" else "inprocess" if launch.kind == "alone" else "torch"
    if name == "inprocess":
        if launch.size > 1:
            raise ConfigError(
                f"runtime.transport = 'inprocess', but {LAUNCHERS[launch.kind]} has started {launch.size} ranks; "
                "use auto, or start without a launcher"
            )
        return InProcessTransport()
    if name == "mpi":
        return _open_mpi(launch, timeout, late)
    return _open_torch(launch, timeout)


def introduce(transport: Transport, peer: Peer) -> None:
    """Exchange the peers of all ranks: where each runs and what it sees; sets `transport.peers`."""
    peers = transport.gather_texts(replace(peer, device_buffers=transport.device_buffers).to_json())
    text = transport.broadcast_text(json.dumps(peers))
    transport.peers = [*map(Peer.from_json, json.loads(text))]


def _open_mpi(launch: Launch, timeout: float, late: Callable[[str], NoReturn] | None) -> Transport:
    if launch.kind == "torchrun" and launch.size > 1:
        raise ConfigError(
            f"runtime.transport = 'mpi', but torchrun has started {launch.size} ranks, which MPI cannot connect; "
            f"use auto or torch, or start with mpirun -n {launch.size} pflmpi run ..."
        )
    try:
        from pflmpi.transports.mpi import MpiTransport, start, world_size

        start(timeout, late or partial(exit_unconnected, launch.rank, {}))
    except (ImportError, RuntimeError) as error:  # no mpi4py, or mpi4py without an MPI library
        raise ConfigError(
            f"runtime.transport = 'mpi' needs mpi4py and an MPI library ({describe_error(error)}); {_INSTALL_MPI}"
        ) from error
    if world_size() != launch.size:
        raise ConfigError(
            f"{LAUNCHERS[launch.kind]} has started {launch.size} ranks, but MPI sees {world_size()}; launcher and MPI "
            "library do not match: try srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH), or the library's own mpirun"
        )
    return MpiTransport(timeout)


def _open_torch(launch: Launch, timeout: float) -> Transport:
    if launch.kind != "torchrun" and not launch.address:
        raise ConfigError(
            f"runtime.transport = 'torch', but {LAUNCHERS[launch.kind]} has started this, and {_FOR_TORCH} are not all "
            "set; start with torchrun --nproc-per-node R -m pflmpi run ..., or use auto"
        )
    from pflmpi.transports.torchdist import TorchTransport

    return TorchTransport(launch, timeout)

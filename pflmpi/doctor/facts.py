"""What the doctor knows about each rank: plain values, which travel to rank 0 as JSON."""

from pydantic import BaseModel, ConfigDict


class _Facts(BaseModel):
    # Ranks may run different versions of pflmpi, which is one of the things to find out: keys that are not known are
    # dropped, and those that are missing have their defaults.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Asked(_Facts):
    """What a run would be asked for.

    Attributes:
        error: why the configuration cannot be used; "" if it can.
        digest: of the resolved configuration; "" without one.
        transport, device, threads, faults: of its section `runtime`.
    """

    error: str = ""
    digest: str = ""
    transport: str = "auto"
    device: str = "auto"
    threads: int = 1
    faults: str = "stop"


class Machine(_Facts):
    """The part of a host that a rank may use; bytes, of which 0 is for unknown.

    Attributes:
        cores: that the rank may use.
        omp: the text of OMP_NUM_THREADS, None where it is not set.
        memory, memory_free: of the host, or of the control group (a job, a container) where that has less.
        shared_free: of /dev/shm.
        temporary, temporary_free: the folder for temporary files.
    """

    cores: tuple[int, ...] = ()
    omp: str | None = None
    memory: int = 0
    memory_free: int = 0
    shared_free: int | None = None
    temporary: str = ""
    temporary_free: int = 0


class Device(_Facts):
    """Where a rank computes.

    Attributes:
        name: "CPU", or the GPU's; "" if there is an error.
        gpus: that torch finds.
        uuid: of the GPU.
        memory, memory_free: bytes of the GPU.
        visible: the text of CUDA_VISIBLE_DEVICES, None where it is not set.
        error: why it cannot compute.
        gloo, nccl: what torch.distributed can use; nccl with its version, "" without.
    """

    name: str = ""
    gpus: int = 0
    uuid: str = ""
    memory: int = 0
    memory_free: int = 0
    visible: str | None = None
    error: str = ""
    gloo: bool = False
    nccl: str = ""


class Mpi(_Facts):
    """The MPI library.

    Attributes:
        used: whether it is what connects the ranks, or would be.
        library: name and version; "" if there is none.
        world: how many ranks it sees; 0 if it was not started.
        device_buffers: whether it can send from a GPU's memory; None if it does not say.
        fault_tolerance: whether it was built with ULFM.
        fault_tolerant: whether mpirun was told how ranks can go on when one dies.
        error: why it cannot be used.
    """

    used: bool = False
    library: str = ""
    world: int = 0
    device_buffers: bool | None = None
    fault_tolerance: bool = False
    fault_tolerant: bool = False
    error: str = ""


class Folder(_Facts):
    """The folder of a run, or the nearest one above it that exists.

    Attributes:
        path: that was looked at.
        error: why it cannot be written.
        flock, hdf5: why files in it cannot be locked, by the system's call and by HDF5; "" if they can.
        seen: whether a file that rank 0 made is there; None if it made none.
        lock_seen: whether rank 0's lock on it holds here; None if that cannot be tried.
        free: bytes.
        unfinished: files that a process which is gone has left half-written; known to rank 0 only, as is the rest.
        flagged: HDF5 files that are marked as being written, and that no process of this host has open.
        locked: lock files that somebody holds, with the processes of this host that do.
    """

    path: str = ""
    error: str = ""
    flock: str = ""
    hdf5: str = ""
    seen: bool | None = None
    lock_seen: bool | None = None
    free: int = 0
    unfinished: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    locked: dict[str, tuple[int, ...]] = {}


class Data(_Facts):
    """The files of the dataset.

    Attributes:
        name: of the dataset; "" without a configuration.
        root: the data folder; "" if none is set.
        files: their number; digest: over their names and sizes.
        error: what is missing; download: whether a run would fetch it.
    """

    name: str = ""
    root: str = ""
    files: int = 0
    digest: str = ""
    error: str = ""
    download: bool = False


class Clock(_Facts):
    """How many seconds a rank's clock is ahead of rank 0's, give or take `within`."""

    ahead: float = 0.0
    within: float = 0.0


class Facts(_Facts):
    """All about one rank.

    Attributes:
        rank, size: of the whole run, as the launcher says.
        launcher: "alone", "mpi", "torchrun" or "slurm"; "unclear" if its variables contradict each other.
        connection: why this rank has no connection to the others; "" if it has.
        slurm: Slurm's variables, shortened; empty outside of a job.
        versions: of each package; "" if it is not there.
        broken: packages that are there and cannot be imported, with the reason.
    """

    rank: int = 0
    size: int = 1
    launcher: str = "alone"
    host: str = ""
    connection: str = ""
    asked: Asked = Asked()
    machine: Machine = Machine()
    device: Device = Device()
    mpi: Mpi = Mpi()
    folder: Folder = Folder()
    data: Data = Data()
    clock: Clock = Clock()
    slurm: dict[str, str] = {}
    versions: dict[str, str] = {}
    broken: dict[str, str] = {}

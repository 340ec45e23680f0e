"""What the doctor knows about each rank: plain values, sent to rank 0 as JSON."""

from pydantic import BaseModel, ConfigDict

PACKAGES = ("torch", "numpy", "h5py", "mpi4py")  # whose versions are compared


class _Facts(BaseModel):
    # Ranks may have different versions of pflmpi, which is one of the problems to find: unknown keys are dropped, and
    # missing ones get their defaults.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Settings(_Facts):
    """What the configuration says, or its defaults without one."""

    error: str = ""  # why the configuration cannot be used
    digest: str = ""  # of the resolved configuration
    transport: str = "auto"  # this and what follows: of its section `runtime`
    device: str = "auto"
    threads: int = 1


class Machine(_Facts):
    """The part of a host that a rank may use; sizes in bytes, 0 where unknown."""

    cores: tuple[int, ...] = ()
    omp: str | None = None  # text of OMP_NUM_THREADS, None where it is not set
    memory: int = 0  # of the host, or of its control group (a job, a container) where that has less
    memory_free: int = 0
    shared_free: int | None = None  # of /dev/shm, None where there is none
    temporary: str = ""  # the folder for temporary files
    temporary_free: int = 0


class Device(_Facts):
    """Where a rank computes, and what torch can use."""

    name: str = ""  # "CPU", or the GPU's
    gpus: int = 0  # that torch finds
    uuid: str = ""  # of the GPU
    memory: int = 0  # bytes of the GPU
    memory_free: int = 0
    visible: str | None = None  # text of CUDA_VISIBLE_DEVICES, None where it is not set
    error: str = ""  # why the rank cannot compute
    messages: str = ""  # how large messages reach the GPUs, and why; "" without them
    gloo: bool = False  # whether torch.distributed has it
    nccl: str = ""  # its version, "" without


class Mpi(_Facts):
    """The MPI library."""

    used: bool = False  # whether it connects the ranks
    library: str = ""  # name and version, "" without one
    world: int = 0  # the number of ranks that it sees, 0 if it was not started
    device_buffers: bool | None = None  # whether it sends from a GPU's memory, None if it does not say
    error: str = ""  # why it cannot be used


class Folder(_Facts):
    """The folder of a run, or its nearest parent that exists."""

    path: str = ""
    error: str = ""  # why it cannot be written
    flock: str = ""  # why the system cannot lock a file in it
    hdf5: str = ""  # why HDF5 cannot lock a file in it
    seen: bool | None = None  # whether rank 0's file is there, None if rank 0 could make none
    lock_seen: bool | None = None  # whether rank 0's lock on that file holds here, None if unknown
    free: int = 0  # bytes
    # On rank 0 only:
    unfinished: tuple[str, ...] = ()  # half-written files that no process of this host has open
    flagged: tuple[str, ...] = ()  # HDF5 files marked as being written that no process of this host has open
    locked: dict[str, tuple[int, ...]] = {}  # lock files that are held -> the processes of this host that hold them


class Data(_Facts):
    """The files of the dataset."""

    name: str = ""  # of the dataset, "" without a configuration
    root: str = ""  # the data folder, "" if none is set
    files: int = 0  # their number
    digest: str = ""  # of their names and sizes
    error: str = ""  # what is missing
    download: bool = False  # whether a run would fetch what is missing


class Clock(_Facts):
    """Seconds that a rank's clock is ahead of rank 0's, give or take `within`."""

    ahead: float = 0.0
    within: float = 0.0


class RankFacts(_Facts):
    """All that is known about one rank."""

    rank: int = 0  # this and `size` as the launcher says
    size: int = 1
    launcher: str = "alone"  # or "mpi", "torchrun", "slurm"; "unclear" if its variables contradict each other
    host: str = ""
    connection: str = ""  # why this rank has no connection to the others
    settings: Settings = Settings()
    machine: Machine = Machine()
    device: Device = Device()
    mpi: Mpi = Mpi()
    folder: Folder = Folder()
    data: Data = Data()
    clock: Clock = Clock()
    slurm: dict[str, str] = {}  # Slurm's variables by short names, empty outside of a job
    versions: dict[str, str] = {}  # package -> version, "" if it is not installed
    broken: dict[str, str] = {}  # package that cannot be imported -> the reason

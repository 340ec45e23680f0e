"""Resource limits of the system: which one an error comes from, and how to raise it."""

import errno
import re
import resource

from pflmpi.text import pluralize

_OTHER_FILES = 64  # files that a rank opens besides its connections to other ranks
_ADDRESS_SPACE = 4  # GB of addresses for PyTorch's libraries and a small run
_ADDRESSES_TO_DRAW = 80 << 30  # bytes; this process was seen to reserve 68 GB with vl-convert 1.9

_NO_MEMORY = re.compile(
    r"failed to map segment|annot allocate memory|an't allocate memory|not enough memory|std::bad_alloc"
)
_NO_GPU_MEMORY = re.compile(r"(?:CUDA|HIP)(?: error:)? out of memory\b[. ]*(?P<how>.*? is free)?", re.IGNORECASE)
_NO_THREADS = re.compile(r"can't start new thread|Resource temporarily unavailable|libgomp: Thread creation failed")
_NO_FILES = re.compile(r"Too many open files")


def explain_limit(error: BaseException) -> str | None:
    """Name the limit that an error of the system or of a library comes from, and the remedy; None for other errors.

    >>> explain_limit(ValueError("no number"))
    """
    text, code = str(error), error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or code == errno.ENOMEM or _NO_MEMORY.search(text):
        return _out_of_memory()
    if match := _NO_GPU_MEMORY.search(text):
        how = f" ({match['how']})" if match["how"] else ""
        return (
            f"out of memory on a GPU{how}; lower runtime.lanes (fewer clients at once), training.micro_batch "
            "(samples at once), training.batch_size or evaluation.batch_size, or give each rank a GPU of its own; "
            "`pflmpi plan CONFIG --gpus 1 --gpu-memory GIB` says what fits"
        )
    if code == errno.EAGAIN or (isinstance(error, RuntimeError) and _NO_THREADS.search(text)):
        return (
            f"no more processes or threads can be started: `ulimit -u` allows {_soft(resource.RLIMIT_NPROC)} for all "
            "of this user's; raise it, end other processes, or use fewer ranks"
        )
    if code in (errno.EMFILE, errno.ENFILE) or _NO_FILES.search(text):
        return f"too many open files: `ulimit -n` allows {_soft(resource.RLIMIT_NOFILE)}; raise it, or use fewer ranks"
    return None


def check_file_limit(ranks: int = 1) -> str | None:
    """Raise the soft limit of open files as far as the ranks need; returns the problem if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_FILES + 2 * ranks
    if 0 <= soft < needed and hard != soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if 0 <= soft < needed:
        allowed = f"`ulimit -n` allows {soft} open files"
        return f"{allowed}, and {pluralize(ranks, 'rank')} must be able to open {needed}; raise it"
    return None


def too_few_addresses_to_draw() -> str | None:
    """The problem if the address space is too small to draw figures, where vl-convert would end without an error."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY or soft >= _ADDRESSES_TO_DRAW:
        return None
    return (
        f"`ulimit -v` allows {soft >> 10} kB, and what draws figures reserves 64 GB of addresses (not of memory); "
        "raise it: `ulimit -v unlimited`"
    )


def _out_of_memory() -> str:
    """Error text for a lack of memory, with the limits that may have caused it."""
    limits = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}
    low = [f"`ulimit {name}` allows {_soft(limit, 10)} kB" for name, limit in limits.items() if _soft(limit) != "any"]
    if not low:
        return "out of memory; use fewer ranks on this node, a smaller batch, or ask for more memory"
    return (
        f"out of memory: {' and '.join(low)}, of which PyTorch alone takes about {_ADDRESS_SPACE} GB; "
        f"raise it, for example `ulimit {low[0][8:10]} unlimited`"
    )


def _soft(limit: int, shift: int = 0) -> str:
    """A soft limit as text, in units of 2**shift; "any" if it is unlimited."""
    soft = resource.getrlimit(limit)[0]
    return "any" if soft == resource.RLIM_INFINITY else str(soft >> shift)

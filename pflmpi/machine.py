"""How much memory a process may still take: of the host, or of the control group that it is confined to."""

import re
from pathlib import Path

# Control groups of version 1 name their memory controller, those of version 2 name none. For each: where they are,
# the files with limit and use, and the line of memory.stat with what the kernel gives back when asked for memory.
_KINDS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return bytes in all, and bytes that are free; 0 and 0 where the system does not say.

    Slurm with `--mem`, and containers, confine a process to a control group with less than the host has.

    Args:
        root: where /proc and /sys are.
    """
    try:
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE))
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0, 0
    total, free = 1024 * int(lines["MemTotal"]), 1024 * int(lines["MemAvailable"])
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _KINDS.keys():
            mount, *names = _KINDS[controller]
            for folder in _upwards(root / mount, path):
                limit, used = _limit(folder, *names)
                total, free = min(total, limit), min(free, limit - used)
    return total, max(free, 0)


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return the folder of a group and those of the groups around it: the least limit counts."""
    parts = Path(path.lstrip("/")).parts
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _limit(folder: Path, limit: str, used: str, reclaimable: str) -> tuple[int, int]:
    """Return the limit of a group and what of it is taken for good; no limit where it says so, or nothing."""
    try:
        files = (folder / "memory.stat").read_text().split()
        spare = int(dict(zip(files[::2], files[1::2], strict=True)).get(reclaimable, 0))
        return int((folder / limit).read_text()), max(int((folder / used).read_text()) - spare, 0)
    except (OSError, ValueError):  # the text for no limit is "max"
        return 1 << 63, 0

"""RUN/config.yaml as text: sealed by a checksum in its last line, and taken from a checkpoint where it is gone."""

import json
import zlib
from pathlib import Path
from typing import Any

from pflmpi import atomic
from pflmpi.errors import CheckpointError
from pflmpi.store.names import rounds
from pflmpi.store.reading import read_attributes

# The keys of "recorded", which round files have as attributes.
RECORDED = ("run", "data", "partition", "partition_csv", "device", "ranks", "transport", "versions", "code")

_SEAL = b"# CRC-32 of the lines above: "


def path(run: Path) -> Path:
    """The configuration of a run."""
    return run / "config.yaml"


def write(run: Path, text: str) -> None:
    """Write the configuration, YAML, with its seal."""
    content = text.encode()
    atomic.write(path(run), content + _SEAL + b"%08x\n" % zlib.crc32(content))


def from_checkpoint(run: Path) -> dict[str, Any]:
    """The attributes "config", YAML, and `RECORDED` of the newest readable checkpoint; empty without one."""
    for round in reversed(rounds(run)):
        try:
            found = read_attributes(run, round)
        except CheckpointError:
            continue
        known: dict[str, Any] = {key: found[key] for key in ("config", *RECORDED) if key in found}
        return known | {key: json.loads(known[key]) for key in ("versions", "code") if key in known}
    return {}


def damage(run: Path) -> str | None:
    """Why config.yaml is not as it was written, or None; one of a run without an id, of format 1, has no seal."""
    if not path(run).exists():
        return None
    try:
        content = path(run).read_bytes()
    except OSError as error:
        return f"{path(run)} cannot be read: {error.strerror}"
    above, seal, checksum = content.rpartition(_SEAL)
    if checksum == b"%08x\n" % zlib.crc32(above) if seal else b"\n  run: " not in content:
        return None
    return (
        f"{path(run)} is not as it was written: its CRC-32 is another; put it back from a copy, or delete it: "
        f"`pflmpi resume {run}` then takes the configuration of the newest checkpoint; -s KEY=VALUE changes a value"
    )

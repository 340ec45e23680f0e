"""RUN/config.yaml as text: its checksum, the id of the run, and the copy of it in each checkpoint."""

import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng as zlib

from pflmpi import atomic, regular_file
from pflmpi.errors import CheckpointError
from pflmpi.store.names import rounds
from pflmpi.store.run_folder import JSON, read_attributes
from pflmpi.text import for_shell

_RECORDED = (  # keys of "recorded" that round files have as attributes too
    "run",
    "data",
    "partition",
    "partition_csv",
    "device",
    "ranks",
    "transport",
    "frozen",
    "privacy",
    "no_epsilon",
    "versions",
    "code",
    "unseen",
    "fork",
)

_CHECKSUM = b"# CRC-32 of the lines above: "
_ID = re.compile(r"^  run: '?(\w+)'?$", re.MULTILINE)


def path(run: Path) -> Path:
    return run / "config.yaml"


def write(run: Path, text: str) -> None:
    """Write the configuration, YAML, with its checksum."""
    content = text.encode()
    atomic.write(path(run), content + _CHECKSUM + b"%08x\n" % zlib.crc32(content))


def recorded(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section "recorded" of config.yaml from the attributes of a round file."""
    values = {key: attributes[key] for key in _RECORDED if key in attributes}
    return {key: json.loads(str(value)) if key in JSON else value for key, value in values.items()}


def read_newest_attributes(run: Path) -> dict[str, Any] | None:
    """Reads the attributes of the newest readable checkpoint; None without one."""
    for round in reversed(rounds(run)):
        with contextlib.suppress(CheckpointError):
            return read_attributes(run, round)
    return None


def is_of_run(run: Path) -> bool:
    """Whether a folder has a config.yaml of a run, which has the checksum or the section `recorded`."""
    try:
        content = regular_file.read(path(run))
    except OSError:
        return False
    return _CHECKSUM in content or content.startswith(b"recorded:") or b"\nrecorded:" in content


def find_damage(run: Path) -> str | None:
    """Returns why config.yaml is not as it was written, or None."""
    if not path(run).exists():
        return None
    try:
        content = regular_file.read(path(run))
    except OSError as error:
        return f"{path(run)} cannot be read: {error.strerror}"
    above, _, checksum = content.rpartition(_CHECKSUM)
    if checksum == b"%08x\n" % zlib.crc32(above):
        return None
    removed = "delete it" if is_of_run(run) else "move it away"
    return (
        f"{path(run)} is not as it was written: its CRC-32 is another; put it back from a copy, or {removed}: "
        f"`pflmpi resume {for_shell(run)}` then takes the configuration of the newest checkpoint; "
        "-s KEY=VALUE changes a value"
    )


def new_run_id() -> str:
    """Returns a new id of 16 hexadecimal digits; resuming keeps it, and digests do not cover it."""
    return secrets.token_hex(8)


def run_id(run: Path) -> str | None:
    """Reads the id in RUN/config.yaml, or else in the newest checkpoint; None with a damaged config.yaml."""
    try:
        match = _ID.search(regular_file.read(path(run)).decode())  # a hundred times as quick as a YAML parser
        return match[1] if match else None
    except FileNotFoundError:
        return (read_newest_attributes(run) or {}).get("run")
    except (OSError, UnicodeDecodeError):
        return None

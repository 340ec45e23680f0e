"""Measurements that are kept as small files."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from pflmpi import atomic

T = TypeVar("T")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Cache:
    """Measurements in FOLDER/WORK-MACHINE.json, by what was measured and the machine on which.

    Attributes:
        folder: of the files.
        renew: measure again what is stored.
    """

    folder: Path
    renew: bool = False

    def find(self, kind: type[T], work: Facts, machine: Facts) -> T | None:
        """Stored measurement of some work on a machine; None if there is none, or it is damaged."""
        found = None if self.renew else _read(kind, self.folder / _name(work, machine))
        return found and found[0]

    def find_on_gpu(self, kind: type[T], work: Facts) -> tuple[T, Facts] | None:
        """Newest stored measurement of some work on the GPU of any machine, and that machine."""
        paths = [] if self.renew else sorted(self.folder.glob(f"{_key(work)}-*.json"), key=os.path.getmtime)
        found = [one for one in (_read(kind, path) for path in paths) if one and one[1]["device"] != "cpu"]
        return found[-1] if found else None

    def keep(self, value: object, work: Facts, machine: Facts) -> list[str]:
        """Store a measurement, a dataclass; a remark if that is not possible."""
        content = {"work": work, "machine": machine, "numbers": asdict(value)}  # type: ignore[call-overload]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic.write(self.folder / _name(work, machine), json.dumps(content, indent=1).encode())
        except OSError as error:
            return [f"the measurements are not stored ({self.folder}: {error.strerror})"]
        return []


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of stored measurements, below XDG_CACHE_HOME or .cache of the home folder."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "pflmpi" / "calibration"


def _read(kind: type[T], path: Path) -> tuple[T, Facts] | None:
    try:
        content = json.loads(path.read_text())
        return TypeAdapter(kind).validate_python(content["numbers"]), dict(content["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: it is measured again


def _name(work: Facts, machine: Facts) -> str:
    return f"{_key(work)}-{_key(machine)}.json"


def _key(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

"""Measurements of this machine, kept as small files: CACHE/pflmpi/calibration/KEY.json."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]


def folder(environ: Mapping[str, str]) -> Path:
    """Return where the files are: below XDG_CACHE_HOME, or .cache of the home folder."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "pflmpi" / "calibration"


def find(
    place: Path, facts: Facts, whatever: tuple[str, ...] = (), accept: Callable[[Facts], bool] = lambda found: True
) -> tuple[Facts, Facts] | None:
    """Return the facts and numbers of a file that was measured under these facts, or None.

    Args:
        place: the folder.
        facts: what the numbers depend on.
        whatever: names of facts that may be any; the newest file is taken then.
        accept: which facts will do.
    """
    wanted = _but(json.loads(json.dumps(facts)), whatever)
    paths = sorted(place.glob("*.json"), key=_age) if whatever else [place / f"{_key(facts)}.json"]
    for path in paths:
        try:
            found = json.loads(path.read_text())
            if _but(found["facts"], whatever) == wanted and accept(found["facts"]):
                return found["facts"], found["numbers"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # missing or damaged: it is measured again
    return None


def keep(place: Path, facts: Facts, numbers: Facts) -> str:
    """Store numbers; return why that was not possible, "" if it was."""
    path = place / f"{_key(facts)}.json"
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    try:
        place.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"facts": facts, "numbers": numbers}, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        return f"{place}: {error.strerror}"
    return ""


def _key(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _but(facts: Facts, names: tuple[str, ...]) -> Facts:
    return {name: value for name, value in facts.items() if name not in names}


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0

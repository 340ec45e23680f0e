"""Bad values in every key of the schema, given by `-s` as a user would give them."""

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

import quick_run
from every_algorithm import TRAINING
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config.fields import fields_model, partition_model
from pflmpi.config.load import SECTIONS
from pflmpi.data.partitions import PARTITIONS
from pflmpi.models import MODELS
from raw_files import write_idx
from reliability.trials import Result, Trial, command

LIMIT = 5.0  # seconds until a run is stopped: inside the rounds it is at work, before them it hangs
TEXTS = (
    *("null", "true", "-1", "0", "1.5", "-0.0", "1e-400", "1e-45", "2147483647", "2147483648", "9223372036854775807"),
    *("18446744073709551616", "1e38", "1e308", "1e400", ".nan", "-.inf", "0x7fffffff", "1_000", "1:30", "2026-99-99"),
    *("''", "x", "auto", "[]", "[1, 2]", "{}", "{a: 1}", "{name: x}", "{a: 1, a: 2}", "'[/b]'", "'=1+2'", '"\\0"'),
    *('"\\ud800"', "x" * 300, "[" * 300, "&a [*a]", "!!binary aGk=", "!!int x", "~nobody-here", "../../..", "1e3"),
    *("9" * 400, "é", ":", "- 1", "'5'", "'0.5'"),
)
PARTITION_PARAMETERS: dict[str, dict[str, Any]] = {
    "pathological": {"classes_per_client": 3},
    "dirichlet": {"beta": 0.5, "min_samples": 1},
    "exdir": {"classes_per_client": 4, "alpha": 1.0, "min_samples": 1},
    "nway_kshot": {"n": 3, "k": 3, "noise": 1},
    "lognormal": {"classes_per_client": 3, "sigma": 1.0, "min_samples": 1},
    "iid": {},
    "writers": {},
}


class BadValues:
    """Configurations that are good but for one value."""

    def __init__(self, folder: Path) -> None:
        self._data, self._keys = folder, list(_keys())
        write_idx(folder / "MNIST" / "raw", "mnist", packed=True)

    def attempt(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """A bad value for one of the keys, which take turns."""
        section, name, key, field = self._keys[number % len(self._keys)]
        text = _bad(field, draw)
        where = f"{section}.{key}" if key else section
        (folder / "c.yaml").write_text(yaml.safe_dump(self._base(section, name)))
        trial = Trial(f"{where} ({name or section}) = {text[:60]}")
        words = ["run", "c.yaml", "-s", f"{where}={text}", "--out", "run", "--ranks", "1", "--quiet"]
        result = command(*words, seconds=LIMIT, place=folder)
        if result.code is None and (folder / "run" / "config.yaml").exists():  # it is written last before the rounds
            trial.labels.add("at work")
        else:
            judge(trial, result)
        return trial

    def _base(self, section: str, name: str | None) -> dict[str, Any]:
        """A configuration in which the key can work."""
        raw = quick_run.settings(data={"name": "digits", "limit": 200}, training={"rounds": 1})
        raw["partition"] = {"name": "iid", "clients": 4}
        if section == "data" or (section == "model" and name not in ("mlp", "dnn")) or name == "writers":
            raw["data"] = {"name": "mnist", "root": str(self._data)}
        if section == "partition" and name:
            raw["partition"] = {"name": name, "clients": 3, **PARTITION_PARAMETERS.get(name, {})}
        elif section in ("model", "algorithm") and name:
            raw[section] = {"name": name}
        if section == "algorithm":
            raw["training"] |= TRAINING.get(name or "", {})
        return raw


def judge(trial: Trial, result: Result) -> None:
    """Note how wrong input ended: it must be refused with one message, or be taken and work."""
    lines = [line for line in trial.saw(result).text.splitlines() if line.startswith("pflmpi: ") or "error:" in line]
    errors = [line for line in lines if "passed over" not in line and "warning" not in line]
    if result.code in (0, 1):
        trial.labels.add("taken")
    elif result.code == 2:
        trial.labels.add("refused" if errors and len(errors[-1]) < 2000 else "other")
    elif result.code is not None:  # a client that diverged is named
        trial.labels.add("diverged" if result.code == 3 and "diverged" in result.text else "other")


def _keys() -> Iterator[tuple[str, str | None, str, Any]]:
    """Section, name, key and field of everything in the schema, and whole sections."""
    yield "seed", None, "", None
    for section in ("data", "partition", "model", "algorithm", *SECTIONS):
        yield section, None, "", None
    for section, kind in SECTIONS.items():
        yield from ((section, None, key, field) for key, field in kind.model_fields.items())
    for name in PARTITIONS:
        yield from (("partition", name, key, field) for key, field in partition_model(name).model_fields.items())
    for section, registry in (("model", MODELS), ("algorithm", ALGORITHMS)):
        yield section, None, "name", None
        for name, kind in registry.items():
            yield from ((section, name, key, field) for key, field in fields_model(kind).model_fields.items())
    yield "partition", None, "name", None
    yield "partition", None, "path", None


def _bad(field: Any, rng: random.Random) -> str:
    """A value that is odd for any key, near a limit of this one, or a random number or text."""
    limits = [getattr(part, name) for part in getattr(field, "metadata", ()) for name in ("ge", "gt", "le", "lt")
              if getattr(part, name, None) is not None]  # fmt: skip
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(TEXTS)
    if kind < 0.7 and limits:
        return repr(rng.choice(limits) + rng.choice((-1, 1, -1e-9, 1e-9, 0.5)))
    if kind < 0.8:
        return repr(rng.choice((-1, 1)) * int(10 ** rng.uniform(0, 30)))
    if kind < 0.9:
        return repr(rng.choice((-1, 1)) * 10 ** rng.uniform(-300, 300))
    words = [str(word) for word in get_args(getattr(field, "annotation", None))]
    if words and kind < 0.95:
        return rng.choice(words)[:-1] + rng.choice("xX -")
    return "".join(rng.choices(string.printable, k=rng.randrange(1, 30)))

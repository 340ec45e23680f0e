"""The cases of `hostile_input.py`: a command line for each bad value of a key, and for each damaged file."""

import gzip
import io
import json
import random
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

import quick_run
import table_file
from damage import damaged, damaged_arrays, damaged_json
from every_algorithm import TRAINING
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config.load import SECTIONS, fields_model
from pflmpi.data.partitions import PARTITIONS, section_model
from pflmpi.models import MODELS
from raw_files import random_samples, write_idx, write_leaf, write_sample

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


class Cases:
    """Makes the command line of a case below a folder, where good files of every kind lie."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self._good = folder / "good"
        self._case = folder / "case"
        self._keys = list(_keys())
        self._make_files()
        self._sources = self._file_kinds()

    def clean(self) -> None:
        """Remove what a case has left."""
        shutil.rmtree(self._case, ignore_errors=True)

    def value(self, number: int, rng: random.Random) -> tuple[str, list[str]]:
        """A bad value for one of the keys, which take turns."""
        section, name, key, field = self._keys[number % len(self._keys)]
        text = _bad(field, rng)
        where = f"{section}.{key}" if key else section
        self._case.mkdir()
        (self._case / "c.yaml").write_text(yaml.safe_dump(self._base(section, name)))
        words = ["run", "case/c.yaml", "-s", f"{where}={text}", "--out", "case/run", "--ranks", "1", "--quiet"]
        return f"{where} ({name or section}) = {text[:60]}", words

    def file(self, number: int, rng: random.Random) -> tuple[str, list[str]]:
        """A damaged file of one of the kinds, which take turns."""
        names = list(self._sources)
        name = names[number % len(names)]
        shutil.copytree(self._good, self._case)
        return name, self._sources[name](rng)

    def _base(self, section: str, name: str | None) -> dict[str, Any]:
        """A configuration in which the key can work."""
        raw = quick_run.settings(data={"name": "digits", "limit": 200}, training={"rounds": 1})
        raw["partition"] = {"name": "iid", "clients": 4}
        if section == "data" or (section == "model" and name not in ("mlp", "dnn")) or name == "writers":
            raw["data"] = {"name": "mnist", "root": str(self._good)}
        if section == "partition" and name:
            raw["partition"] = {"name": name, "clients": 3, **PARTITION_PARAMETERS.get(name, {})}
        elif section in ("model", "algorithm") and name:
            raw[section] = {"name": name}
        if section == "algorithm":
            raw["training"] |= TRAINING.get(name or "", {})
        return raw

    def _make_files(self) -> None:
        good = self._good
        write_idx(good / "MNIST" / "raw", "mnist", packed=True)
        write_idx(good / "FashionMNIST" / "raw", "fashion_mnist", packed=False)
        (_, train), (_, test) = random_samples(1, 30, "mnist"), random_samples(2, 10, "mnist")
        who = {"train_writer": np.arange(30) % 5, "test_writer": np.arange(10) % 5}
        np.savez(good / "MNIST" / "writers.npz", train_label=train, test_label=test, **who)
        write_leaf(good / "femnist")
        write_sample(good / "sample" / "FEMNIST")
        cifar = good / "cifar-10-batches-py"
        cifar.mkdir()
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
            (cifar / name).write_bytes(b"\x80\x02}q\x00.")
        raw = quick_run.settings(data={"name": "digits", "limit": 200}, training={"rounds": 2})
        quick_run.run(raw, good / "run")
        (good / "c.yaml").write_text(yaml.safe_dump(raw))
        table_file.write(good)

    def _file_kinds(self) -> dict[str, Callable[[random.Random], list[str]]]:
        config = ["partition", "case/c.yaml", "-s", "partition={name: iid, clients: 3}"]

        def data(name: str, root: str) -> list[str]:
            return [*config, "-s", f"data={{name: {name}, root: {root}}}"]

        def bytes_of(pattern: str, words: list[str]) -> Callable[[random.Random], list[str]]:
            def make(rng: random.Random) -> list[str]:
                path = rng.choice(sorted(self._case.glob(pattern)))
                path.write_bytes(damaged(path.read_bytes(), rng))
                return words

            return make

        def inside_gz(rng: random.Random) -> list[str]:
            path = rng.choice(sorted(self._case.glob("MNIST/raw/*.gz")))
            path.write_bytes(gzip.compress(damaged(gzip.decompress(path.read_bytes()), rng)))
            return data("mnist", "case")

        def arrays(pattern: str, words: list[str]) -> Callable[[random.Random], list[str]]:
            def make(rng: random.Random) -> list[str]:
                path = next(self._case.glob(pattern))
                with np.load(io.BytesIO(path.read_bytes())) as archive:
                    np.savez(path, **damaged_arrays(dict(archive), rng))
                return words

            return make

        def leaf(rng: random.Random) -> list[str]:
            path = rng.choice(sorted(self._case.glob("femnist/*/*.json")))
            path.write_text(json.dumps(damaged_json(json.loads(path.read_text()), rng)))
            return data("femnist", "case")

        def tree(name: str, words: list[str]) -> Callable[[random.Random], list[str]]:
            def make(rng: random.Random) -> list[str]:
                path = self._case / name
                odd = damaged_json(yaml.safe_load(path.read_text()), rng)
                path.write_text(yaml.safe_dump(odd), errors="replace")
                return words

            return make

        def special(rng: random.Random) -> list[str]:
            """A file that is a folder, a link to itself, without rights, or empty."""
            names = ["c.yaml", "small.yaml", "run/config.yaml", "run/metrics.csv", "run/round_00002.h5", "run/shards"]
            path = self._case / rng.choice(names)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            [lambda: path.mkdir(), lambda: path.symlink_to(path), lambda: path.write_bytes(b"")][rng.randrange(3)]()
            return rng.choice([config, [*table, "--dry-run"], ["inspect", run], resume, ["inspect", run, "--verify"]])

        run, table = "case/run", ["sweep", "case/small.yaml", "--out", "case/sweep"]
        resume = ["resume", run, "-s", "training.rounds=3", "--ranks", "1", "--quiet"]
        readers = [["inspect", run], ["inspect", run, "--verify"], ["inspect", run, "--diff", "1", "2"], resume]
        readers += [["report", run, "--out", "case/report"], ["export", run, "--client", "1", "-o", "case/x.npz"]]
        kinds: dict[str, Callable[[random.Random], list[str]]] = {
            "configuration, bytes": bytes_of("c.yaml", config),
            "configuration, values": tree("c.yaml", config),
            "table, bytes": bytes_of("small.yaml", [*table, "--dry-run"]),
            "table, values": tree("small.yaml", [*table, "--dry-run"]),
            "table of a report": tree("small.yaml", ["report", "case/small.yaml", "--write", "case/table"]),
            "idx, bytes": bytes_of("FashionMNIST/raw/*", data("fashion_mnist", "case")),
            "idx.gz, bytes": bytes_of("MNIST/raw/*", data("mnist", "case")),
            "idx in gz": inside_gz,
            "writers.npz": arrays("MNIST/writers.npz", data("mnist", "case")),
            "CIFAR": bytes_of("cifar-10-batches-py/*", data("cifar10", "case")),
            "LEAF, bytes": bytes_of("femnist/*/*.json", data("femnist", "case")),
            "LEAF, values": leaf,
            "npz, bytes": bytes_of("sample/FEMNIST/*", data("femnist", "case/sample")),
            "npz, arrays": arrays("sample/FEMNIST/*", data("femnist", "case/sample")),
            "special files": special,
        }
        for words in readers:
            what = " ".join(words[:1] + [word for word in words if word.startswith("--")][:1])
            kinds[f"run, bytes, {what}"] = bytes_of("run/**/*.*", words)
            kinds[f"run, config.yaml, {what}"] = tree("run/config.yaml", words)
        return kinds


def _keys() -> Iterator[tuple[str, str | None, str, Any]]:
    """Section, name, key and field of everything in the schema, and whole sections."""
    yield "seed", None, "", None
    for section in ("data", "partition", "model", "algorithm", *SECTIONS):
        yield section, None, "", None
    for section, kind in SECTIONS.items():
        yield from ((section, None, key, field) for key, field in kind.model_fields.items())
    for name in PARTITIONS:
        yield from (("partition", name, key, field) for key, field in section_model(name).model_fields.items())
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

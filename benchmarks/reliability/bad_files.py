"""Damaged files of every kind that a user hands over: configurations, tables, data, and runs."""

import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

import quick_run
import table_file
from damage import damaged, damaged_arrays, damaged_json
from raw_files import random_samples, write_idx, write_leaf, write_sample
from reliability.bad_values import judge
from reliability.trials import Trial, command

LIMIT = 60.0  # seconds until a command hangs: the figures of a report are drawn


class BadFiles:
    """Good files of every kind, of which each attempt damages one."""

    def __init__(self, folder: Path) -> None:
        self._good = folder / "good"
        self._make_files()

    def attempt(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """A damaged file of one of the kinds, which take turns."""
        shutil.copytree(self._good, folder / "case")
        kinds = _kinds(folder / "case")
        name = list(kinds)[number % len(kinds)]
        trial = Trial(name)
        judge(trial, command(*kinds[name](draw), seconds=LIMIT, place=folder))
        return trial

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


def _kinds(case: Path) -> dict[str, Callable[[random.Random], list[str]]]:
    """What damages a file of each kind, and the command that is to read it."""
    config = ["data", "case/c.yaml", "-s", "partition={name: iid, clients: 3}"]

    def data(name: str, root: str) -> list[str]:
        return [*config, "-s", f"data={{name: {name}, root: {root}}}"]

    def bytes_of(pattern: str, words: list[str]) -> Callable[[random.Random], list[str]]:
        def make(draw: random.Random) -> list[str]:
            path = draw.choice(sorted(case.glob(pattern)))
            path.write_bytes(damaged(path.read_bytes(), draw))
            return words

        return make

    def inside_gz(draw: random.Random) -> list[str]:
        path = draw.choice(sorted(case.glob("MNIST/raw/*.gz")))
        path.write_bytes(gzip.compress(damaged(gzip.decompress(path.read_bytes()), draw)))
        return data("mnist", "case")

    def arrays(pattern: str, words: list[str]) -> Callable[[random.Random], list[str]]:
        def make(draw: random.Random) -> list[str]:
            path = next(case.glob(pattern))
            with np.load(io.BytesIO(path.read_bytes())) as archive:
                np.savez(path, **damaged_arrays(dict(archive), draw))
            return words

        return make

    def leaf(draw: random.Random) -> list[str]:
        path = draw.choice(sorted(case.glob("femnist/*/*.json")))
        path.write_text(json.dumps(damaged_json(json.loads(path.read_text()), draw)))
        return data("femnist", "case")

    def tree(name: str, words: list[str]) -> Callable[[random.Random], list[str]]:
        def make(draw: random.Random) -> list[str]:
            path = case / name
            odd = damaged_json(yaml.safe_load(path.read_text()), draw)
            path.write_text(yaml.safe_dump(odd), errors="replace")
            return words

        return make

    def special(draw: random.Random) -> list[str]:
        """A file that is a folder, a link to itself, without rights, or empty."""
        names = ["c.yaml", "small.yaml", "run/config.yaml", "run/metrics.csv", "run/round_00002.h5", "run/shards"]
        path = case / draw.choice(names)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        [lambda: path.mkdir(), lambda: path.symlink_to(path), lambda: path.write_bytes(b"")][draw.randrange(3)]()
        return draw.choice([config, [*table, "--dry-run"], ["inspect", run], resume, ["inspect", run, "--verify"]])

    run, table = "case/run", ["sweep", "case/small.yaml", "--out", "case/sweep"]
    resume = ["resume", run, "-s", "training.rounds=3", "--ranks", "1", "--quiet"]
    readers = [["inspect", run], ["inspect", run, "--verify"], ["inspect", run, "--diff", "1", "2"], resume]
    readers += [["report", run, "--out", "case/report"], ["export", run, "--client", "1", "-o", "case/x.npz"]]
    kinds: dict[str, Callable[[random.Random], list[str]]] = {
        "configuration, bytes": bytes_of("c.yaml", config),
        "configuration, values": tree("c.yaml", config),
        "table, bytes": bytes_of("small.yaml", [*table, "--dry-run"]),
        "table, values": tree("small.yaml", [*table, "--dry-run"]),
        "table of a report": tree("small.yaml", ["table", "case/small.yaml", "--write", "case/table"]),
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

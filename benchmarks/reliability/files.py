"""Files of a run that were damaged, exchanged, or come from elsewhere."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from reliability.trials import Trial, command, digest, resume

ROUNDS = 4
CONFIG: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "limit": 400},
    "partition": {"name": "exdir", "clients": 7, "classes_per_client": 3, "alpha": 0.7, "min_samples": 4},
    "model": {"name": "mlp", "hidden": 12},
    "algorithm": {"name": "fedgmh"},
    "training": {"rounds": ROUNDS, "participation": 0.4, "epochs": 1, "batch_size": 10, "lr": 0.1, "momentum": 0.5},
    "checkpoint": {"keep": 0},
    "runtime": {"device": "cpu"},
}


class Files:
    """Two runs that differ in their seed, one of them with the digest of one round more.

    Args:
        folder: for both.
    """

    def __init__(self, folder: Path) -> None:
        self.run, self.other, self.config = folder / "run", folder / "other", folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG))
        for run, seed in ((self.run, 3), (self.other, 4)):
            command("run", self.config, "--out", run, "--ranks", 2, "--quiet", "-s", f"seed={seed}")
            command("probe", run)
        longer = shutil.copytree(self.run, folder / "longer")
        command("resume", longer, "--ranks", 1, "--quiet", "-s", f"training.rounds={ROUNDS + 1}")
        self.expected = digest(longer)

    def flip(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """One flipped bit in one file: a text file in every second attempt."""
        run = shutil.copytree(self.run, folder / "run")
        texts = [path for path in _files(run) if path.suffix != ".h5"]
        path = draw.choice(texts if draw.random() < 0.5 else _files(run))
        content = bytearray(path.read_bytes())
        position, bit = draw.randrange(len(content)), draw.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        return self._judge(run, f"bit {bit} of byte {position} of {path.relative_to(run)}")

    def exchange(self, number: int, draw: random.Random, folder: Path) -> Trial:
        """One file replaced by another."""
        run = shutil.copytree(self.run, folder / "run")
        path, exchange = draw.choice(_files(run)), draw.choice(EXCHANGES)
        before = path.read_bytes()
        what = exchange(path, self.other / path.relative_to(run), draw)
        if path.is_file() and path.read_bytes() == before:  # the same file in both runs
            path.unlink()
            what = "deleted"
        return self._judge(run, f"{path.relative_to(run)} {what}", None if path.parent.name == "shards" else path)

    def _judge(self, run: Path, what: str, lost: Path | None = None) -> Trial:
        trial = Trial(what)
        verified = trial.saw(command("inspect", run, "--verify"))
        removed = lost is not None and lost.name.startswith(("round_", "probe_")) and not os.path.lexists(lost)
        good = "removed" if removed else "missed"  # a run may lack a checkpoint, also the newest, as after a kill
        trial.labels.add("found" if verified.code == 2 else good)
        resume(trial, run, self.config, self.expected, "-s", f"training.rounds={ROUNDS + 1}")
        return trial


def _files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def _older(path: Path, other: Path, draw: random.Random) -> str:
    source = draw.choice([each for each in _files(path.parent) if each.suffix == path.suffix])
    shutil.copy(source, path.with_name("copy"))
    path.with_name("copy").replace(path)
    return f"is {source.name} of the same run"


def _foreign(path: Path, other: Path, draw: random.Random) -> str:
    shutil.copy(other, path)
    return "is that of another run"


def _foreign_folder(path: Path, other: Path, draw: random.Random) -> str:
    for each in other.parent.iterdir():
        if each.is_file():
            shutil.copy(each, path.parent)
    return "and all beside it are those of another run"


def _deleted(path: Path, other: Path, draw: random.Random) -> str:
    path.unlink()
    return "deleted"


def _emptied(path: Path, other: Path, draw: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def _cut(path: Path, other: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    length = draw.randrange(len(content))
    path.write_bytes(content[:length])
    return f"cut to {length} bytes"


def _garbage(path: Path, other: Path, draw: random.Random) -> str:
    path.write_bytes(draw.randbytes(draw.randrange(1, 5000)))
    return "is random bytes"


def _folder(path: Path, other: Path, draw: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "is a folder"


def _dangling(path: Path, other: Path, draw: random.Random) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "is a link to nothing"


EXCHANGES: tuple[Callable[[Path, Path, random.Random], str], ...] = (
    _older,
    _older,
    _foreign,
    _foreign,
    _foreign_folder,
    _deleted,
    _emptied,
    _cut,
    _garbage,
    _folder,
    _dangling,
)

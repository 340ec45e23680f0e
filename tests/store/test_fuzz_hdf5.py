"""Damaged files of a run are found, and no file of another form ends in anything but one line that names it."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quick_run
from damage import damaged
from described import about
from fuzzing import fuzz
from pflmpi.analysis.run import open_run
from pflmpi.config import stored
from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, run_folder, verify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    quick_run.run(quick_run.settings(algorithm={"name": "fedavg"}, training={"rounds": 1}), folder)
    return folder


def files(run: Path) -> list[Path]:
    return sorted([*run.glob("round_*.h5"), *run.glob("shards/*.h5")])


@fuzz(25)
@given(st.integers(0, 2**32))
def test_any_damage_to_a_file_is_found(run, seed):
    rng = random.Random(seed)
    path = rng.choice(files(run))
    good = path.read_bytes()
    changed = damaged(good, rng)
    path.write_bytes(changed)
    try:
        problems = verify.problems(run, 1) + verify.problems(run, 0)
        assert bool(problems) == (changed != good)
        assert all("\n" not in problem for problem in problems)
    finally:
        path.write_bytes(good)


@fuzz(25)
@given(st.integers(0, 2**32))
def test_a_file_of_another_form_is_one_error(run, tmp_path_factory, seed):
    """The checksums are right, as in a file that somebody made or changed with a tool."""
    rng = random.Random(seed)
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run, copy)
    path = rng.choice(files(copy))
    _rewritten(path, rng)
    if rng.random() < 0.3:
        (copy / "config.yaml").unlink()  # the one in the newest checkpoint is read
    for read in _readers(copy):
        try:
            read()
        except (CheckpointError, UserWarning) as error:  # warned of where an older round stands for a damaged one
            assert "\n" not in str(error) and str(copy) in str(error)


def _readers(run: Path) -> list[Callable[[], object]]:
    return [
        lambda: verify.problems(run, 1),
        lambda: stored.read(run),
        lambda: verify.find_newest_good(run),
        lambda: run_folder.digest(run, 1),
        lambda: run_folder.read_clients(run, 1, np.arange(7)),
        lambda: run_folder.read_server(run, 1),
        lambda: open_run(run).round().personal,
        lambda: open_run(run).round().diagnostics,
        lambda: {path: np.asarray(rows[:]) for path, rows in open_run(run).round().clients.items()},
        lambda: dict(open_run(run).round().metrics),
    ]


def _rewritten(path: Path, rng: random.Random) -> None:
    """Write a file anew with one group, array or attribute of it removed or replaced."""

    def fill(writer: checked_hdf5.HDF5Writer) -> None:
        target = writer.file
        with h5py.File(path, "r") as source:
            for name in source:
                source.copy(name, target)
            writer.about = about(source)
            places: list[str] = []
            source.visit(places.append)
        place = rng.choice(places)
        kind = rng.randrange(3)
        if kind == 0:
            section = rng.choice([writer.about, *(value for value in writer.about.values() if isinstance(value, dict))])
            key = rng.choice([*section, "more"])
            section[key] = rng.choice((5, -1, 2**62, "x", "{}", "[1]", [1], {"a": None}, None, "\x1b"))
        elif kind == 1:
            del writer.about[rng.choice(list(writer.about))]
        else:
            del target[place]
            if rng.random() < 0.6:
                target[place] = rng.choice((5, -1, 2**62, "x", np.zeros(3), np.nan, b"\xff"))
            elif rng.random() < 0.5:
                target.create_group(place)

    draft = path.with_suffix(".new")
    checked_hdf5.write(draft, fill)
    draft.replace(path)

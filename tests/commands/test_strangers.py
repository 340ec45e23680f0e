"""Every command that reads, over every kind of hostile file: limits of memory and time, what it opens and writes.

A file is hostile where it would have a reader wait (a FIFO), go on for ever, leave the run, or take what is declared
for what is there.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quick_run
from described import about, restate
from hostile_files import (
    CONTENT,
    DATA,
    ESC,
    KINDS,
    PLACES,
    ROUND,
    SHARD,
    Hostile,
    crafted,
    escaping_name,
    folder_out,
    in_place,
    secrets,
)
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.errors import ConfigError
from pflmpi.store import config_file, probe_file, run_folder
from pflmpi.store.run_lock import take

CONTROL = re.compile("[\0-\t\v-\x1f\x7f-\x9f]")
TABLE = {f"{kind.__name__} {place}": in_place(kind, place) for kind in KINDS for place in PLACES}
HOSTILE: dict[str, Hostile] = {**TABLE, "shards elsewhere": folder_out, **CONTENT}
VERIFY = ["inspect", "RUN", "--verify"]
SLOW = {
    "digest": ["inspect", "RUN", "--digest"],
    "all": ["export", "RUN", "--all", "-o", "OUT/one.h5"],
    "inspect": ["inspect", "RUN"],
    "diff": ["inspect", "RUN", "--diff", "1", "2"],
    "older": ["export", "RUN", "--all", "--round", "1", "-o", "OUT/one.h5"],
    "server": ["export", "RUN", "--server", "-o", "OUT/server.npz"],
    "client": ["export", "RUN", "--client", "0", "-o", "OUT/client.npz"],
    "report": ["report", "RUN", "--out", "OUT/report"],
    "compare": ["compare", "RUN", "GOOD"],
    "status": ["status", "RUN"],
    "plan": ["plan", "RUN/config.yaml"],
    "evaluate": ["evaluate", "RUN"],
    "bisect": ["bisect", "RUN", "GOOD"],
    "prune": ["prune", "RUN", "--every", "2", "--dry-run"],
    "fork": ["fork", "RUN", "--out", "OUT/fork"],
}
WATCHED = Path(__file__).parents[1] / "helpers" / "watched.py"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "run"
    partition = {**quick_run.QUICK["partition"], "clients": 4}
    quick_run.run(quick_run.settings(training={"rounds": 2}, partition=partition), folder)
    layers = {"layer": probe_file.LayerSimilarity(np.arange(2), np.eye(2))}
    probe_file.write(folder, probe_file.Probe(2, 9, layers))
    return folder


class Cases:
    """Commands, each on a copy of its own of the good run with one hostile file."""

    def __init__(self, good: Path, folder: Path) -> None:
        self.good, self.folder = good, folder
        self.words: list[tuple[list[str], list[str]]] = []
        self.names: list[tuple[str, str]] = []

    def add(self, name: str, hostile: Hostile, command: str, words: list[str]) -> None:
        place = self.folder / str(len(self.names))
        place.mkdir()
        secrets(place / "outside")
        (place / "out").mkdir()
        run = shutil.copytree(self.good, place / "run")
        hostile(run, place / "outside")
        named = {"RUN": str(run), "OUT": str(place / "out"), "GOOD": str(self.good)}
        filled = [re.sub("RUN|OUT|GOOD", lambda match: named[match[0]], word) for word in words]
        shards = place / "outside/shards" if (run / "shards").is_symlink() else run / "shards"
        self.words.append((filled, [str(run), str(shards), str(place / "outside"), str(place)]))
        self.names.append((name, command))

    def add_data(self, name: str, make: Callable[[Path, Path], Path]) -> None:
        place = self.folder / str(len(self.names))
        (place / "own").mkdir(parents=True)
        secrets(place / "outside")
        path = make(place / "own", place / "outside")
        self.words.append((["data", str(path)], [str(place / "own"), str(place / "outside")]))
        self.names.append((name, "data"))

    def results(self) -> dict[tuple[str, str], dict[str, Any]]:
        spec = self.folder / "cases.json"
        spec.write_text(json.dumps(self.words))
        words = [sys.executable, "-P", str(WATCHED), str(spec)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        places = [{**line, "place": str(self.folder / str(number))} for number, line in enumerate(lines)]
        return dict(zip(self.names, places, strict=True))


Results = dict[tuple[str, str], dict[str, Any]]


def _over(good, folder, command, words, names):
    cases = Cases(good, folder)
    for name in names:
        cases.add(name, HOSTILE[name], command, words)
    return cases.results()


def _names_for(command):
    """Hostile files that a command is tried over; every third for those that take seconds.

    A CONFIG that a user types may be a pipe, which `plan` waits for as any program does.
    """
    names = list(HOSTILE)[:: 3 if command in ("report", "plan", "evaluate", "fork", "prune", "bisect") else 1]
    return [name for name in names if command != "plan" or not re.fullmatch("(fifo|link_to_fifo) config.yaml", name)]


@pytest.fixture(scope="module")
def quick(good, tmp_path_factory):
    return _over(good, tmp_path_factory.mktemp("quick"), "verify", VERIFY, HOSTILE)


@pytest.fixture(scope="module")
def slow(good, tmp_path_factory):
    return cache(lambda name: _over(good, tmp_path_factory.mktemp(name), name, SLOW[name], _names_for(name)))


def check(result):
    """It ended by itself with at most one clear error, opened nothing elsewhere and wrote only what `-o` names."""
    assert result["code"] in (0, 1, 2), result
    assert result["code"] or not result["err"].startswith("pflmpi: "), result
    assert "internal error" not in result["err"] and "Traceback" not in result["err"], result["err"]
    assert not CONTROL.search((result["out"] + result["err"]).replace("\n", "")), result
    place = result["place"]
    assert not [path for path in result["opened"] if path.startswith(f"{place}/outside")], result["opened"]
    assert not result["written"], result["written"]
    ours = re.compile(rf"(open|os\.\w+) ({re.escape(place)}/out\b|\d+$|/dev/null|/tmp/|/proc/self/clear_refs|None)")
    foreign = [line for line in result["python"] if f"{place}/run" in line or f"{place}/outside" in line]
    assert not foreign and all(ours.match(line) for line in result["python"]), result["python"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_named_or_left_alone(name, quick):
    check(quick[name, "verify"])


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), [(each, name) for each in SLOW for name in _names_for(each)])
def test_every_other_command_too(command, name, slow):
    check(slow(command)[name, command])


@pytest.mark.parametrize("name", sorted(CONTENT.keys() - {"a circle", "a soft circle", "doubling groups"}))
def test_what_a_file_must_not_hold_is_refused_by_name(name, quick):
    result = quick[name, "verify"]
    assert result["code"] == 2 and re.search(f"{ROUND}|{SHARD}", result["err"] + result["out"]), result


@pytest.fixture(scope="module")
def data(good, tmp_path_factory):
    cases = Cases(good, tmp_path_factory.mktemp("data"))
    for name, make in DATA.items():
        cases.add_data(name, make)
    return cases.results()


@pytest.mark.parametrize("name", DATA)
def test_hostile_data_is_one_error(name, data):
    result = data[name, "data"]
    check(result)
    assert result["code"] == 2 and result["err"].count("\n") == 1, result


def test_the_good_run_is_good(good, tmp_path):
    """So that what is refused above is not refused for another reason."""
    cases = Cases(good, tmp_path)
    for command in ("verify", "digest", "all"):
        cases.add("good", lambda run, outside: None, command, {"verify": VERIFY, **SLOW}[command])
    for result in cases.results().values():
        check(result)
        assert result["code"] == 0, result


def _name_algorithm(run, name):
    """Name another algorithm in config.yaml and in the checkpoint that vouches for it."""

    def named(text):
        return text.replace("name: fedgmh", f"name: {name}")

    def change(file, outside):
        description = about(file)
        description["run"]["config"] = named(description["run"]["config"])
        restate(file, description)

    crafted(ROUND, change)(run, run)
    config_file.write(run, named((run / "config.yaml").read_text()).rpartition("# CRC-32")[0])


def _names(run, outside):
    """Names with what a terminal obeys: of an array, the algorithm, the host."""
    crafted(ROUND, escaping_name("server"))(run, outside)
    _name_algorithm(run, json.dumps(ESC))
    owner = {"token": "1", "host": ESC, "process": 1, "system": "", "started": 0, "since": 0, "jobs": {ESC: 1}}
    (run / "lock.json").write_text(json.dumps({**owner, "folder": run.stat().st_ino}))


def test_no_control_character_of_a_file_reaches_the_terminal(good, tmp_path):
    cases = Cases(good, tmp_path)
    for command in ("inspect", "server", "status"):
        cases.add("names", _names, command, SLOW[command])
    results = cases.results()
    for result in results.values():
        check(result)
    assert "\\x1b]0;owned" in results["names", "inspect"]["out"]
    assert "\\x1b]0;owned" in results["names", "status"]["out"]


def test_code_of_a_run_is_announced_before_it_is_imported(good, tmp_path):
    def names_code(run, outside):
        (run / "evil.py").write_text("raise SystemExit('executed')\n")
        _name_algorithm(run, f"{run}/evil.py:Evil")

    cases = Cases(good, tmp_path)
    for command in ("evaluate", "inspect", "server"):
        cases.add("code", names_code, command, SLOW[command])
    results = cases.results()
    assert re.search(
        "names code, which is executed now: .*evil.py:Evil\n.*executed", results["code", "evaluate"]["err"]
    )
    assert results["code", "inspect"]["code"] == results["code", "server"]["code"] == 0
    assert not any(
        path.endswith("evil.py") for reader in ("inspect", "server") for path in results["code", reader]["opened"]
    )


def test_reading_never_repairs(good, tmp_path):
    """What a killed run leaves stays as it is."""
    run = shutil.copytree(good, tmp_path / "run")
    newest = max(run_folder.rounds(run))
    later = run / f"shards/round_{newest + 1:05d}_rank_000.h5"
    later.write_bytes(b"half a shard")
    later.with_name(f"{later.name}.tmp").write_bytes(b"half a file")
    with (run / "metrics.csv").open("a") as file:
        file.write(f"{newest + 1},")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in (["inspect"], ["inspect", "--verify"], ["report", "--out", str(tmp_path / "page")]):
        main([words[0], str(run), *words[1:]])
    assert open_run(run).rounds[-1] == newest
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_nothing_is_written_or_deleted_through_a_link(good, tmp_path):
    run = shutil.copytree(good, tmp_path / "run")
    (run / "shards").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/round_00009_rank_000.h5").write_text("not the run's")
    (run / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="it is a link, which may lead out of the run"):
        take(run, {}, take_over=False)
    assert (tmp_path / "elsewhere/round_00009_rank_000.h5").exists()

"""A new user's first algorithm: the page `docs/new-algorithm.md` is enough, on any launcher."""

import re
import subprocess
import sys

import pytest
import yaml

import own_code
import processes
import quick_run
from pflmpi.cli import main
from pflmpi.store import run_folder
from project import ROOT

PAGE = (ROOT / "docs" / "new-algorithm.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder outside the repository with the file of the page, and a configuration that names it."""
    path = tmp_path_factory.mktemp("new user")
    (path / "fedmine.py").write_text(blocks("python")[0])
    raw = quick_run.settings(yaml.safe_load(blocks("yaml")[0]))
    (path / "mine.yaml").write_text(yaml.safe_dump(raw))
    return path


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_algorithm_of_the_page_is_known_to_the_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["list", "fedmine.py:FedMine"]) == 0
    shown = capsys.readouterr().out
    assert "pull" in shown and "weight of the distance" in shown.replace("\n", " ").replace("│", "")
    assert main(["plan", "mine.yaml", "--ranks", "2"]) == 0


def test_the_tests_of_the_page_pass(folder):
    (folder / "test_fedmine.py").write_text(blocks("python")[1])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "bytes or lanes_agree",
            "test_fedmine.py",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_all_launchers_give_its_bits_and_continue_them(folder, tmp_path):
    config = own_code.write(tmp_path / "code", training={"rounds": 2})
    for name, path in (("page", folder / "mine.yaml"), ("own", config)):
        digests = []
        for way, ranks in (("alone", 1), ("mpi", 3), ("torchrun", 2)):
            run = tmp_path / f"{name}-{way}"
            words = [*processes.start_way(way, ranks), "run", str(path), "--out", str(run), "--quiet"]
            words += ["-s", "training.rounds=1"] if way == "mpi" else []
            done = processes.call([*words, *(["--ranks", "1"] if way == "alone" else [])], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            if way == "mpi":
                rounds = run_folder.rounds(tmp_path / f"{name}-alone")[-1]
                words = [*processes.PFLMPI, "resume", str(run), "--ranks", "2", "-s", f"training.rounds={rounds}"]
                done = processes.call(words, cwd="/")
                assert done.returncode == 0, done.stderr
            digests.append(run_folder.digest(run, run_folder.rounds(run)[-1]))
        assert len(set(digests)) == 1, (name, digests)

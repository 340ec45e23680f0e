"""Completion in a shell: commands, options, names and keys, without importing what is slow."""

import os
import subprocess
import sys

import pytest

import processes
from pflmpi.algorithms import ALGORITHMS
from pflmpi.commands import completion
from pflmpi.config.load import SECTIONS
from pflmpi.data import SOURCES
from pflmpi.data.partitions import PARTITIONS
from pflmpi.models import MODELS
from project import ROOT

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def completed(line, folder, *python):
    """What argcomplete is told for a line typed so far, and what Python says meanwhile."""
    output_file = folder / "told"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environment = {**os.environ, **variables, "_ARGCOMPLETE_STDOUT_FILENAME": str(output_file)}
    command = [sys.executable, *python, str(processes.BIN / "pflmpi")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return {word.strip() for word in output_file.read_text().split("\n")}, done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pflmpi com", {"compare"}),
        ("pflmpi run --co", {"--continue"}),
        ("pflmpi list fedg", {"fedgh", "fedgmh"}),
        ("pflmpi list patho", {"pathological"}),
        ("pflmpi run -s algorithm.name=pfedp", {"algorithm.name=pfedpm"}),
        ("pflmpi run -s training.round", {"training.rounds="}),
        ("pflmpi run c", {"config.yaml"}),
    ],
)
def test_words_are_completed(line, words, tmp_path):
    (tmp_path / "config.yaml").touch()
    assert completed(line, tmp_path)[0] == words


def test_bash_completes_after_the_documented_line(tmp_path):
    (switch,) = [line for line in PAGE.splitlines() if line.startswith("eval ") and "zsh" not in line]
    script = f"""{switch}
COMP_LINE="pflmpi list fedg"; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(pflmpi list fedg); COMP_CWORD=2; COMP_TYPE=9
_python_argcomplete pflmpi fedg list; echo ${{COMPREPLY[@]}}"""
    path = f"{processes.BIN}{os.pathsep}{os.environ['PATH']}"
    done = processes.call(["bash", "-c", script], env={**os.environ, "PATH": path}, cwd=tmp_path)
    assert done.stdout.split() == ["fedgh", "fedgmh"], done.stderr


def test_completion_imports_nothing_slow(tmp_path):
    _, stderr = completed("pflmpi run -s algorithm.name=", tmp_path, "-X", "importtime")
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in stderr.splitlines() if "|" in line}
    assert "argcomplete" in loaded and not loaded & {"torch", "numpy", "pydantic", "rich", "h5py", "sklearn"}


def test_the_names_and_keys_are_those_of_the_registries():
    for section, registry in (
        ("algorithm", ALGORITHMS),
        ("data", SOURCES),
        ("model", MODELS),
        ("partition", PARTITIONS),
    ):
        assert sorted(completion.names(section)) == list(registry)
    keys = {key for name, kind in SECTIONS.items() for key in (f"{name}.{field}" for field in kind.model_fields)}
    assert set(completion.keys()) == keys

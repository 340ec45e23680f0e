"""`pflmpi docs`: the documentation that comes with the package."""

import dataclasses
import re

import numpy as np
import pytest

import processes
from pflmpi.algorithms import ALGORITHMS
from pflmpi.cli import main
from pflmpi.config import load
from pflmpi.data.partitions import PARTITIONS
from project import ROOT

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_it_lists_every_page_with_its_title(capfd):
    assert main(["docs"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == PAGES
    assert "gpus" in PAGES and next(line.split(maxsplit=1)[1] for line in lines if line.startswith("gpus ")) == "GPUs"


def test_it_prints_a_page_as_it_is(capfd):
    assert main(["docs", "networks"]) == 0
    assert capfd.readouterr().out.strip() == (ROOT / "docs" / "networks.md").read_text().strip()


def test_it_shows_a_page_in_a_terminal_of_another_encoding():
    environment = {**processes.ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in ([], ["configuration"]):
        done = processes.call([*processes.PFLMPI, "docs", *words], env=environment)
        assert done.returncode == 0 and "onfiguration" in done.stdout, done.stderr[:300]


def test_another_page_is_refused_with_those_that_there_are(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["docs", "gpu"])
    assert ended.value.code == 2 and "'networks'" in capfd.readouterr().err


def rows(page):
    """The cells of the tables of a page, without heads and rules."""
    lines = [line for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_what_flags_of_other_frameworks_become_exists_here():
    table = [row for row in rows("coming-from") if row[-1] != "here"]
    for key in re.findall(r"\b([a-z]+\.[a-z_]+)\b(?=[:`])", " ".join(row[-1] for row in table)):
        section, name = key.split(".")
        if section in load.SECTIONS:
            assert name in load.SECTIONS[section].model_fields, key
    options = [row for row in table if len(row) == 4]
    assert len(options) > 10
    for names, *_, keys in options:
        for name in names.split(", "):
            fields = {field.name for field in dataclasses.fields(ALGORITHMS[name.lower()])}
            assert set(re.findall(r"`([a-z_0-9]+)", keys)) <= fields, name
    partitions = re.findall(r"`partition: (\{.*?\})", " ".join(row[-1] for row in table))
    labels = np.repeat(np.arange(10), 100)
    for text in partitions:
        section = load.partition(load.override({}, [f"partition={text}"])["partition"])
        PARTITIONS[section.name](labels, section.clients, np.random.default_rng(0), **section.parameters)

"""Edited text files of a run: what is shown differs from what the run wrote only where that is said, or not at all."""

import random
import re
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

import quick_run
from pflmpi.analysis.run import open_run
from pflmpi.analysis.runs import open_runs
from pflmpi.analysis.summary import summarize_run
from pflmpi.cli import main
from pflmpi.cluster.run_status import read_run_status
from pflmpi.config.sections import by_key
from pflmpi.errors import CheckpointError
from pflmpi.store import config_file

EDITS = 150  # of each file
LAST, VOUCHED = 5, 4  # rounds; the newest checkpoint is of the last but one, as after a kill


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (3, 4):
        settings = quick_run.settings(seed=seed, training={"rounds": LAST}, checkpoint={"keep": 2})
        quick_run.run(settings, folder / str(seed))
        (folder / str(seed) / f"round_{LAST:05d}.h5").unlink()
    return folder / "3", folder / "4"


@pytest.fixture
def run(runs, tmp_path):
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


# --- edits: from the content of a file, and that of another run's ----------------------------------------------------


def lines_of(content):
    return content.splitlines(keepends=True)


def swapped(content, other, random):
    lines = lines_of(content)
    a, b = random.sample(range(len(lines)), 2)
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def other_digit(content, other, random):
    place = random.choice([match.start() for match in re.finditer(rb"\d", content)])
    digit = (int(content[place : place + 1]) + random.randint(1, 9)) % 10
    return content[:place] + str(digit).encode() + content[place + 1 :]


def other_byte(content, other, random):
    place = random.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << random.randrange(8))]) + content[place + 1 :]


def zeroed(content, other, random):
    place = random.randrange(len(content))
    return content[:place] + bytes(len(content) - place)


def cut(content, other, random):
    return content[: random.randrange(len(content))]


def cut_after_a_line(content, other, random):
    return b"".join(lines_of(content)[: random.randrange(len(lines_of(content)))])


def without_a_line(content, other, random):
    lines = lines_of(content)
    del lines[random.choice([0, 1, random.randrange(len(lines))])]
    return b"".join(lines)


def doubled_line(content, other, random):
    lines = lines_of(content)
    place = random.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def appended(content, other, random):
    return content + re.sub(rb"^\d+", str(len(lines_of(content))).encode(), random.choice(lines_of(content)))


def without_a_value(content, other, random):
    lines = lines_of(content)
    place = random.randrange(len(lines))
    lines[place] = lines[place].partition(b",")[2]
    return b"".join(lines)


def of_another_run(content, other, random):
    return other


def mixed(content, other, random):
    place = random.randrange(1, min(len(lines_of(content)), len(lines_of(other))))
    return b"".join([*lines_of(content)[:place], *lines_of(other)[place:]])


KINDS = [
    *(swapped, other_digit, other_digit, other_byte, zeroed, cut, cut_after_a_line, without_a_line, doubled_line),
    *(appended, without_a_value, of_another_run, mixed),
]


def edits(name, runs):
    """Contents that differ from that of a file."""
    content, other = ((run / name).read_bytes() for run in runs)
    for seed in range(EDITS):
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        edited = kind(content, other, chance)
        if seed % 3 == 0 and edited.count(b"\n") > 1:
            edited = chance.choice(KINDS[:5])(edited, other, chance)
        if edited != content:
            yield f"{kind.__name__}, {seed}", edited


# --- what is shown ----------------------------------------------------------------------------------------------------


def shown(run):
    """What commands show of a run; None where they refuse it."""
    try:
        opened = open_run(run)
        summarize_run(opened)
        return opened, {"config": by_key(opened.config), "columns": opened.columns, "notes": opened.notes}
    except CheckpointError:
        state = read_run_status(run)
        assert state is None or state.problem or not (run / "config.yaml").exists()
        return None


def check(run, truth, counts, what):
    """Fail if something is shown that the run did not write, and nothing said; whether anything was shown."""
    if (run_and_values := shown(run)) is None:
        return False
    opened, values = run_and_values
    notes = "; ".join(values["notes"])
    for key in truth["config"].keys() | values["config"].keys():
        assert values["config"].get(key) == truth["config"].get(key) or f"{key} = " in notes, (what, key)
    assert values["columns"].keys() == truth["columns"].keys(), what
    for name, column in truth["columns"].items():
        actual = values["columns"][name]
        assert VOUCHED <= len(actual) <= LAST, what
        assert np.array_equal(actual[:VOUCHED], column[:VOUCHED], equal_nan=True), (what, name)
    noted = len(values["columns"]["round"]) == VOUCHED or f"round {LAST} are not vouched for by a checkpoint" in notes
    assert noted, what
    try:
        actual = opened.counts
    except CheckpointError:
        return True
    assert np.array_equal(actual.train, counts.train) and np.array_equal(actual.test, counts.test), what
    return True


@pytest.mark.parametrize("name", ["metrics.csv", "config.yaml", "partition.csv"])
def test_nothing_is_shown_that_the_run_did_not_write_but_where_it_is_said(name, runs, run):
    run_and_values = shown(run)
    assert run_and_values is not None
    truth, counts = run_and_values[1], run_and_values[0].counts
    kept = 0
    for what, edited in edits(name, runs):
        (run / name).write_bytes(edited)
        kept += check(run, truth, counts, what)
    assert kept < EDITS / 2 or name == "partition.csv", "most edits are refused; without its partition a run is shown"


def test_a_configuration_whose_checksum_was_made_anew_is_held_against_the_round_file(runs, run):
    run_and_values = shown(run)
    assert run_and_values is not None
    for what, edited in islice(edits("config.yaml", runs), None, None, 5):  # each is parsed as YAML
        text, _, _ = edited.decode(errors="replace").rpartition("# CRC-32")
        config_file.write(run, text)
        check(run, run_and_values[1], run_and_values[0].counts, what)


# --- by the command line ----------------------------------------------------------------------------------------------


def changed_lr(run):
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["training"]["lr"] = 0.7
    config_file.write(run, yaml.safe_dump(values, sort_keys=False))


def doubled_round(run):
    with (run / "metrics.csv").open("a") as file:
        file.write((run / "metrics.csv").read_text().splitlines(keepends=True)[-1])


def sixth_round(run):
    with (run / "metrics.csv").open("a") as file:
        file.write((run / "metrics.csv").read_text().splitlines(keepends=True)[-1].replace("5,", "6,", 1))


def first_line_lost(run):
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join([lines[0], *lines[2:]]))


def no_metrics(run):
    (run / "metrics.csv").unlink()


DAMAGES = {
    changed_lr: "config.yaml is not the one that the run was written with: training.lr = 0.7",
    doubled_round: "metrics.csv is damaged: line 7 is of round '5', and 6 is to follow",
    sixth_round: "metrics.csv is damaged: it has 6 rounds, and training.rounds is 5",
    first_line_lost: "metrics.csv differs from what round 4 recorded, in lines 1 to 5",
    no_metrics: "metrics.csv is missing; `pflmpi resume",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_command_says_it(damage, runs, run, capfd):
    damage(run)
    out = str(run.parent / "report")
    for words, code in (
        (["report", str(run), "--out", out], 2),
        (["report", str(run), str(runs[0]), "--out", out], 1),
        (["compare", str(run), str(runs[0])], 2),
        (["status", str(run)], 2),
        (["inspect", str(run), "--verify"], 2),
    ):
        assert main(words) == code, words
        shown = capfd.readouterr()
        assert DAMAGES[damage] in shown.out + shown.err, words


def test_lines_that_no_checkpoint_vouches_for_are_said(runs, tmp_path, capfd):
    note = f"metrics of round {LAST} are not vouched for by a checkpoint"
    for words in (["compare", *map(str, runs)], ["status", str(runs[0])], ["inspect", str(runs[0]), "--verify"]):
        assert main(words) == 0
        assert note in " ".join(capfd.readouterr().out.split()), words
    assert main(["report", str(runs[0]), "--out", str(tmp_path)]) == 0
    assert note in (tmp_path / "report.html").read_text()


def test_a_value_that_may_change_is_said_until_a_checkpoint_has_it(runs, run, capfd):
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["training"]["rounds"] = 9
    config_file.write(run, yaml.safe_dump(values, sort_keys=False))
    for words in (["compare", str(run), str(runs[1])], ["status", str(run)], ["inspect", str(run)]):
        assert main(words) == 0
        shown = " ".join(capfd.readouterr().out.split())
        assert "training.rounds = 9 in config.yaml, 5 in round 4: not vouched for by a checkpoint" in shown, words


def test_many_runs_in_python_are_verified_too(runs, run):
    opened = open_runs([runs[1], run])
    assert opened[1].columns["round"].tolist() == [1, 2, 3, 4, 5]
    sixth_round(run)
    with pytest.raises(CheckpointError, match="it has 6 rounds, and"):
        open_runs([runs[1], run]).frame()


def test_a_run_whose_partition_is_not_its_own_is_not_reported(runs, run, capfd):
    shutil.copy(runs[1] / "partition.csv", run)
    assert main(["report", str(run), "--out", str(run.parent / "report")]) == 2
    assert "partition.csv is not as it was written" in capfd.readouterr().err

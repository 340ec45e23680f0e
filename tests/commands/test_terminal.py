"""What reaches the terminal: names as they are, no error when nobody reads, words that no file can have refused."""

import csv
import getpass
import os
import subprocess
from pathlib import Path

import pytest
import yaml

import processes
import quick_run
import table_file
from pflmpi.cli import main
from pflmpi.errors import show
from pflmpi.store import verify
from pflmpi.text import format_csv

MARKUP = "[/b] :smile: [red]x"


def closed_pipe() -> int:
    """The writing end of a pipe whose reader has left, as `head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    quick_run.run(quick_run.settings(training={"rounds": 1}), Path(MARKUP))
    assert main(["inspect", MARKUP]) == 0
    assert f"{MARKUP}, round 1" in capfd.readouterr().out
    assert main(["inspect", "[/b]"]) == 2
    assert "[/b]" in capfd.readouterr().err
    Path("c.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    assert main(["data", "c.yaml", "--save", f"{MARKUP}.npz"]) == 0
    assert f"{{path: {MARKUP}.npz}}" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["x" * 300, os.fsdecode(b"\xff"), "c.yaml/below", "p/" * 3000])
@pytest.mark.parametrize("command", ["run", "resume", "inspect", "data", "report", "table", "sweep"])
def test_a_name_that_no_file_can_have_is_one_error(command, name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    table_file.write(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(quick_run.settings()))
    words = {
        "run": ["run", "c.yaml", "--ranks", "1", "--out", name],
        "data": ["data", "c.yaml", "--save", name],
        "sweep": ["sweep", "small.yaml", "--out", name],
    }
    assert quick_run.command(words.get(command, [command, name])) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1 and shown.startswith("pflmpi: ") and "internal error" not in shown


def test_no_path_is_cut_where_nobody_says_how_wide_lines_are(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    run = tmp_path / "/".join(["a folder of quite a long name"] * 6) / "run"
    quick_run.run(quick_run.settings(training={"rounds": 2}), run)
    twin = (
        quick_run.run(quick_run.settings(training={"rounds": 2, "lr": 0.2}), run.with_name("twin")) and f"{run}/../twin"
    )
    table = table_file.write(tmp_path)
    for words in (
        ["inspect", str(run)],
        ["inspect", str(run), "--diff", "1", "2"],
        ["status", str(run)],
        ["report", str(run), "--out", str(run.with_name("report"))],
        ["export", str(run), "--all", "-o", str(run.with_name("one.h5"))],
        ["inspect", str(run.with_name("one.h5"))],
        ["table", str(table), "--out", str(run.with_name("sweep"))],
    ):
        main(words)
        captured = capfd.readouterr()
        assert str(run.parent) in captured.out, words
    assert main(["compare", str(run), twin]) == 0
    assert len({len(line) for line in capfd.readouterr().out.splitlines() if line}) == 1, "one table"


def test_a_run_outlives_those_who_read_its_output(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings()))
    writer = closed_pipe()
    command = [*processes.PFLMPI, "run", str(config), "--ranks", "1", "--out", str(tmp_path / "run")]
    done = processes.call(command, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    assert verify.find_newest_good(tmp_path / "run")[0] == 3


@pytest.mark.parametrize("words", [["docs"], ["--help"]])
def test_a_command_ends_quietly_when_nobody_reads(words):
    writer = closed_pipe()
    done = processes.call([*processes.PFLMPI, *words], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_under_the_output_is_an_error():
    with open("/dev/full", "w") as full:
        done = processes.call([*processes.PFLMPI, "docs", "python"], stdout=full)
    assert done.returncode == 3 and "the output could not be written: No space left" in done.stderr


def test_closed_descriptors_are_opened_before_a_file_can_have_their_numbers():
    code = "import os; from pflmpi.terminal import outlive_readers; outlive_readers(); os.write(3, b''); "
    probe = f"{code} raise SystemExit(10 + os.open('/dev/null', os.O_RDONLY))"
    shell = f'exec {processes.PFLMPI[0]} -c "{probe}" 3>/dev/null <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", shell], timeout=60, check=False).returncode == 14


def test_no_cell_of_a_table_is_a_formula():
    lines = [["=1+2", "+x", "-x", "@x", "\tx"], ["-0.5", -0.5, "x=1", "+3", 7]]
    text, numbers = csv.reader(format_csv(lines).splitlines())
    assert text == ["'=1+2", "'+x", "'-x", "'@x", "'\tx"]
    assert numbers == ["-0.5", "-0.5", "x=1", "+3", "7"]


def test_no_row_of_a_sweep_is_a_formula(tmp_path, capsys):
    rows = {"=cmd|' /C calc'!A0": {"algorithm": {"name": "fedavg"}}}
    table = table_file.write(tmp_path, rows=rows, published={next(iter(rows)): {"few": [50.0]}})
    assert main(["table", str(table), "--write", str(tmp_path)]) == 0
    with open(tmp_path / "small.csv") as file:
        assert [line["row"] for line in csv.DictReader(file)] == ["'=cmd|' /C calc'!A0"] * 2


def test_names_that_others_know_in_the_temporary_folder_block_no_run(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    user = getpass.getuser()
    (shared / f"torchinductor_{user}").write_text("somebody else's")
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(quick_run.settings(runtime={"executor": "lanes"})))
    environment = {**processes.ENVIRONMENT, "TMPDIR": str(shared)}
    command = [*processes.PFLMPI, "run", str(config), "--ranks", "1", "--out", str(tmp_path / "run"), "--quiet"]
    done = processes.call(command, env=environment)
    assert done.returncode == 0, done.stderr
    assert (shared / f"torchinductor_{user}").read_text() == "somebody else's"


def test_a_long_internal_error_is_cut(capfd):
    show(ValueError("x" * 99_999))
    shown = capfd.readouterr().err
    assert shown.startswith("pflmpi: internal error: ValueError('xxx") and len(shown) < 400

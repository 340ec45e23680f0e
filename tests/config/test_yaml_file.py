"""YAML files as people get them wrong: one line says what, and nothing is lost or waited for."""

import os
import time
from pathlib import Path

import pytest

from pflmpi.config.yaml_file import dump, parse, read, read_stored
from pflmpi.errors import ConfigError

BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("training: {lr: 1}\ndata: {}\ntraining: {epochs: 2}\n", "'training' is in line 1 and again in line 3"),
        ("training:\n  lr: 1\n  lr: 2\n", "'lr' is in line 2 and again in line 3"),
        ("- {a: 1}\n- {b: 1,\n   b: 2}\n", "'b' is in line 2 and again in line 3"),
        ("training: {lr: 1, lr: 2}\n", "'lr' is in line 1 and again there"),
        (BOMB, "more than 100000 values"),
        ("seed: &a [*a]\n", "refers to itself"),
        ("[" * 3000, "nested too deeply"),
        ("a: " + "{b: " * 2000 + "1" + "}" * 2000, "nested too deeply"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_a_text_that_is_wrong_is_refused_in_one_short_line(text, says):
    began = time.process_time()
    with pytest.raises(ConfigError, match=says) as raised:
        parse(text, "here")
    assert len(str(raised.value)) < 600 and "\n" not in str(raised.value)
    assert time.process_time() - began < 30, "a bomb would take for ever"


def test_aliases_of_a_sensible_size_work():
    assert parse("base: &base {lr: 0.1}\nrows: [*base, *base]\n", "here") == {
        "base": {"lr": 0.1},
        "rows": [{"lr": 0.1}, {"lr": 0.1}],
    }
    assert parse("", "here") is None


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        read(Path(str(tmp_path) + "/a\0b"))
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read(tmp_path / "missing.yaml")


def test_a_pipe_is_read_up_to_a_limit(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"seed: 3\n")
    os.close(writing)
    try:
        assert read(Path(f"/dev/fd/{reading}")) == {"seed": 3}
    finally:
        os.close(reading)
    with pytest.raises(ConfigError, match="cannot read /dev/zero: it has more than 16 MiB"):
        read(Path("/dev/zero"))


def test_that_of_a_run_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        read_stored(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(ConfigError, match="it is a link"):
        read_stored(tmp_path / "link")
    with pytest.raises(ConfigError, match="a directory"):
        read_stored(tmp_path)


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not text"):
        read(tmp_path / "bytes.yaml")


@pytest.mark.parametrize("text", ["24e9629048434664", "1e3", "12_4e5", "+1e-3", "1E+7", ".5e2", "0x1F", "1.", "true"])
def test_a_text_that_looks_like_a_number_is_read_as_it_was_written(text):
    assert parse(dump({"recorded": text, text: [text]}), "config.yaml") == {
        "recorded": text,
        text: [text],
    }

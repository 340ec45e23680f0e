"""YAML files and sections as people get them wrong: one line says what, and nothing is lost or waited for."""

import os
import re
import time
from pathlib import Path

import pytest

import quick_run
from pflmpi.config import load as configuration
from pflmpi.config.load import partition
from pflmpi.config.sections import merge, override
from pflmpi.config.yaml_file import dump, parse, read, read_stored
from pflmpi.data.config import PartitionConfig
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
        ("[" * 3000, "nested too deeply|maximum nesting depth"),
        ("a: " + "{b: " * 2000 + "1" + "}" * 2000, "nested too deeply|maximum nesting depth"),
        ("- " * 400 + "1", "nested too deeply"),
        ("a: \ud800", "not valid YAML"),
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
    assert parse(dump({"recorded": text, text: [text]}), "config.yaml") == {"recorded": text, text: [text]}


def test_a_section_becomes_a_config_with_all_defaults():
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    config = partition(section)
    parameters = {
        "classes_per_client": 2,
        "alpha": 0.5,
        "balanced_cap": True,
        "min_samples": 10,
        "max_tries": 5000,
        "draw": "run",
    }
    assert config == PartitionConfig(name="exdir", clients=20, parameters=parameters)
    assert config.resolved() == section | parameters
    assert partition(config.resolved()) == config
    assert partition({"name": "iid", "clients": 3, "balanced": False}).parameters == {"balanced": False}


def test_writers_need_no_number_of_clients_and_others_do():
    assert partition({"name": "writers"}).clients is None
    assert partition({"name": "writers", "clients": 4}).clients == 4
    with pytest.raises(ConfigError, match=r"partition\.clients is missing: number of clients"):
        partition({"name": "iid"})


def test_a_saved_partition_is_the_only_key():
    config = partition({"path": "parts.npz"})
    assert config == PartitionConfig(path="parts.npz") and config.resolved() == {"path": "parts.npz"}
    with pytest.raises(
        ConfigError, match=r"partition\.path must be the only key.*remove partition\.clients, partition\.name"
    ):
        partition({"path": "parts.npz", "name": "iid", "clients": 3})
    with pytest.raises(ConfigError, match=r"partition\.path = 3 is not a file name"):
        partition({"path": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "exdri"}, "unknown partition 'exdri'; did you mean 'exdir'"),
        ({"name": None}, r"partition\.name = None is not a name; known: dirichlet, exdir"),
        ({"alhpa": 1}, "unknown key in partition: 'alhpa'; did you mean 'alpha'"),
        ({"alpha": 0}, r"partition\.alpha = 0: must be greater than 0"),
        ({"alpha": "much"}, r"partition\.alpha = 'much': must be a valid number"),
        ({"alpha": float("nan")}, r"partition\.alpha = nan: must be a finite number"),
        ({"alpha": True}, r"partition\.alpha = True: must be a valid number"),
        ({"clients": 0}, r"partition\.clients = 0: must be greater than or equal to 1"),
        ({"clients": 2.5}, r"partition\.clients = 2\.5: must be a valid integer"),
        ({"clients": None}, r"partition\.clients = None: must be a valid integer"),
        ({"balanced_cap": "perhaps"}, r"partition\.balanced_cap = 'perhaps': must be true or false"),
        ({"min_samples": 0}, r"partition\.min_samples = 0: must be greater than or equal to 1"),
    ],
)
def test_a_wrong_section_is_refused_with_what_is_allowed(change, message):
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    with pytest.raises(ConfigError, match=message):
        partition(section | change)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"evaluation": {"measures": "auroc"}}, r"evaluation\.measures = 'auroc': must be a list, such as \[auroc\]"),
        ({"training": {"stop": "none"}}, r"training\.stop = 'none': must be a mapping, such as .*, or null"),
        ({"training": {"drop_last": 1}}, r"training\.drop_last = 1: must be true or false"),
    ],
)
def test_another_kind_of_value_is_refused_with_how_it_is_written(section, message):
    with pytest.raises(ConfigError, match=message):
        configuration.parse(quick_run.settings(section))


def test_missing_keys_are_named():
    with pytest.raises(ConfigError, match=r"partition\.classes_per_client is missing.*partition\.alpha is missing"):
        partition({"name": "exdir", "clients": 3})
    with pytest.raises(ConfigError, match=r"partition\.name is missing; known: .*; or give partition\.path"):
        partition({"clients": 3})


def test_quoted_values_are_refused_as_in_every_section():
    with pytest.raises(ConfigError, match=r"partition\.balanced = 'false': must be true or false"):
        partition({"name": "iid", "clients": 3, "balanced": "false"})


FILE = {
    "partition": {"name": "iid", "clients": 9},
    "model": [{"name": "mlp"}, {"name": "cnn"}],
    "algorithm": {"name": "fedprox", "prox_weight": 3},
    "training": {"lr": 0.05, "batch_size": 20},
}


def test_an_override_of_a_section_without_a_name_keeps_its_other_keys():
    assert override(FILE, ["training={rounds: 2}"])["training"] == {"lr": 0.05, "batch_size": 20, "rounds": 2}
    assert override(FILE, ["algorithm={prox_weight: 1}"])["algorithm"] == {"name": "fedprox", "prox_weight": 1}
    assert override(FILE, ["partition={clients: 3}"])["partition"] == {"name": "iid", "clients": 3}
    with pytest.raises(ConfigError, match="give the whole section, with its name"):
        override(FILE, ["model={hidden: 5}"])


def test_null_in_place_of_the_keys_of_a_section_is_refused():
    assert override(FILE, ["training={}"]) == FILE
    with pytest.raises(ConfigError, match=r"training is null, in place of .*; give the keys that are to change"):
        override(FILE, ["training=null"])


def test_a_name_or_a_saved_partition_is_a_new_section():
    assert override(FILE, ["algorithm={name: fedavg}"])["algorithm"] == {"name": "fedavg"}
    assert override(FILE, ["model=mlp"])["model"] == {"name": "mlp"}
    assert override(FILE, ["partition={path: my.npz}"])["partition"] == {"path": "my.npz"}
    assert merge(FILE, {"partition": {"path": "my.npz"}})["partition"] == {"path": "my.npz"}


@pytest.mark.parametrize("text", ["data.path=", "training= ", "seed=", "training.stop.patience="])
def test_an_override_without_a_value_is_refused(text):
    with pytest.raises(ConfigError, match=rf"override '{text}' has no value after the =; give one, or null for none"):
        override(FILE, [text])
    assert override({}, ["data.path=null", "data.root=''"]) == {"data": {"path": None, "root": ""}}


@pytest.mark.parametrize("value", ["grade #2", "é #2", "#2", "[a] # one", "a: 1 # one"])
def test_an_override_that_a_comment_would_cut_is_refused(value):
    with pytest.raises(ConfigError, match=rf"""or quote the text: 'data\.label="{re.escape(value)}"'$"""):
        override({}, [f"data.label={value}"])
    for text in ('"grade #2"', "'grade #2'", "grade#2", "|\n grade #2"):
        assert override({}, [f"data.label={text}"])["data"]["label"] == text.strip("'\"|\n ")


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        ("algorithm.prox_weight=1", "algorithm=fedprox"),
        ("training.lr=1", "training={lr: 2}"),
        ("training.stop.patience=2", "training.stop=null"),
    ],
)
def test_an_override_that_would_undo_one_before_it_is_refused(key, whole):
    with pytest.raises(ConfigError, match=rf"comes after that of {key.split('=')[0]}, a key of it; give it first"):
        override(FILE, [key, whole])
    override(FILE, [whole, key])


@pytest.mark.parametrize("text", ["0042", "010", "-07", "0_7", "00", "1:30", "-1:30", "1:30.5", "01.5", "00e1"])
def test_a_number_that_yaml_reads_as_another_is_refused(text):
    instead = "in one unit" if ":" in text else "without the leading zero"
    for yaml in (f"seed: 1\nlr: {text}", f"a: 1\nb: [{text}]", f"a: 1\n{text}: 1"):
        with pytest.raises(ConfigError, match=f"the number '{text}' in line 2: write .*{instead}.*; mend it, or quote"):
            parse(yaml, "here")
    assert parse(f"time: '{text}'", "here") == parse(dump({"time": text}), "here") == {"time": text}


def test_a_zero_other_bases_and_times_of_more_digits_stay_as_they_are():
    assert parse("[0, 0.5, -0, 0e1, 0x1F, 0b11, '0', 1_000, 24:00:00x]", "here")[:7] == [0, 0.5, 0, 0.0, 31, 3, "0"]

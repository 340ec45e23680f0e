"""Numbers that no array, clock or file can count to are refused by name, in every key that takes a number."""

from typing import Any

import pytest

import quick_run
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config import yaml_file
from pflmpi.config.fields import fields_model, partition_model
from pflmpi.config.load import SECTIONS, parse
from pflmpi.config.sections import override
from pflmpi.data.partitions import PARTITIONS
from pflmpi.errors import ConfigError
from pflmpi.models import MODELS


def numeric_keys():
    """Section, name and key of everything in the schema that is a number."""
    kinds: list[tuple[str, str | None, Any]] = [(name, None, kind) for name, kind in SECTIONS.items()]
    kinds += [("partition", name, partition_model(name)) for name in PARTITIONS]
    kinds += [("model", name, fields_model(kind)) for name, kind in MODELS.items()]
    kinds += [("algorithm", name, fields_model(kind)) for name, kind in ALGORITHMS.items()]
    for section, name, kind in kinds:
        for key, field in kind.model_fields.items():
            if any(word in str(field.annotation) for word in ("int", "float")):
                yield section, name, key


KEYS = list(numeric_keys())


@pytest.mark.parametrize(
    "number", ["2147483648", "-2147483649", "9223372036854775807", "1e308", "1e400", ".nan", "-.inf"]
)
def test_a_number_without_measure_is_refused_by_name(number):
    assert len(KEYS) > 60
    for section, name, key in KEYS:
        raw = dict(quick_run.QUICK)
        if section == "partition":
            raw["partition"] = {"name": name, "clients": 3}
        elif name is not None:
            raw[section] = {"name": name}
        expected = rf"^{section}\.{key} = .*must be (a finite number|at most |at least -)"
        with pytest.raises(ConfigError, match=expected) as caught:
            parse(override(raw, [f"{section}.{key}={number}"]))
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["1" + "0" * 400, "9" * 5000, "0x" + "f" * 5000, "9223372036854775808"])
def test_a_whole_number_of_many_digits_is_refused(text):
    with pytest.raises(ConfigError, match="here has a value that cannot be read: the whole number in line 2 has more"):
        yaml_file.parse(f"a: 1\nb: {text}", "here")


TAGS = ["2026-99-99", "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!binary é"]


@pytest.mark.parametrize("text", [*TAGS, "? [a]\n: b", "<<: 5", 'a: "\\uD800"', 'a: "\\0"'])
def test_a_value_that_cannot_be_read_is_one_error(text):
    with pytest.raises(ConfigError, match="here") as caught:
        yaml_file.parse(text, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["seed.x=1"], ["seed.x=1", "seed=3"]])
def test_a_key_of_a_single_value_is_refused_as_such(words):
    with pytest.raises(ConfigError, match=r"seed\.x=1': seed is a single value and has no keys; .* as seed="):
        override({"seed": 3}, words)


def test_a_long_value_is_cut_in_the_error():
    for raw in (
        {"seed": ["x" * 9] * 9999},
        {"training": {"lr": "x" * 99999}},
        {"x" * 99999: 1},
        {"model": "x" * 99999},
    ):
        with pytest.raises(ConfigError) as caught:
            parse({**quick_run.QUICK, **raw})
        assert len(str(caught.value)) < 600


def test_an_override_without_a_key_after_its_point_is_the_one_named():
    with pytest.raises(ConfigError, match=r"override 'training.=3' is not of the form section.key=value"):
        override({}, ["training.=3", "training.rounds=1"])


def test_a_number_out_of_range_is_given_the_bound_that_it_breaks():
    with pytest.raises(ConfigError, match=r"^training.rounds = 99999999999: .* must be at most 2147483647$"):
        parse(override(dict(quick_run.QUICK), ["training.rounds=99999999999"]))


def test_a_seed_that_no_run_could_be_resumed_with_is_refused():
    assert yaml_file.parse(yaml_file.dump(parse({**quick_run.QUICK, "seed": 2**63 - 1}).resolved()), "here")
    with pytest.raises(ConfigError, match=r"^seed = 9223372036854775808: must be a whole number from 0 to 2\^63 - 1$"):
        parse({**quick_run.QUICK, "seed": 2**63})


@pytest.mark.parametrize("text", ["a\0", "a\ud800"])
def test_a_text_that_no_file_can_hold_is_refused_by_name(text):
    raw = {**quick_run.QUICK, "data": {"path": "my.csv", "label": [text]}}
    with pytest.raises(ConfigError, match=r"^data\.label\.0 = 'a.*': has a character that no file can hold; leave it"):
        parse(raw)

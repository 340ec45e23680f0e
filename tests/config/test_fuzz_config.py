"""Configurations and tables of any form are taken, or refused in one short line."""

import copy
import random
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

import quick_run
import table_file
from damage import damaged, damaged_json
from fuzzing import fuzz
from pflmpi.config import yaml_file
from pflmpi.config.load import parse
from pflmpi.config.sections import override
from pflmpi.errors import ConfigError
from pflmpi.sweep import table

TEXT = yaml.safe_dump(quick_run.QUICK)


def is_short(error):
    return "\n" not in str(error) and len(str(error)) < 2000


@fuzz(200)
@given(st.text(alphabet=st.sampled_from("a: -[]{}&*!|>'\"#,?%@`0x1e9_.~<=\n\t\\u\0é")))
def test_any_text_is_a_value_or_refused(text):
    try:
        yaml_file.parse(text, "here")
    except ConfigError as error:
        assert is_short(error) and str(error).startswith("here")


@fuzz(200)
@given(st.integers(0, 2**32))
def test_damaged_configuration_files(tmp_path, seed):
    path = tmp_path / "fuzzed.yaml"
    path.write_bytes(damaged(TEXT.encode(), random.Random(seed)))
    try:
        parse(yaml_file.read(path))
    except ConfigError as error:
        assert is_short(error), str(error)


@fuzz(200)
@given(st.integers(0, 2**32))
def test_configurations_with_an_odd_value(seed):
    raw = damaged_json(copy.deepcopy(quick_run.QUICK), random.Random(seed))
    try:
        parse(raw if isinstance(raw, dict) else {"model": raw})
    except ConfigError as error:
        assert is_short(error), str(error)


@fuzz(200)
@given(st.text(max_size=30), st.sampled_from(["seed", "training.lr", "model", "partition.clients", "runtime", ""]))
def test_any_override_is_taken_or_refused(value, key):
    try:
        parse(override(quick_run.QUICK, [f"{key}={value}"]))
    except ConfigError as error:
        assert is_short(error), str(error)


@fuzz(200)
@given(st.integers(0, 2**32))
def test_tables_with_an_odd_value(tmp_path, seed):
    path = tmp_path / "fuzzed.yaml"
    content = yaml.safe_dump(damaged_json(copy.deepcopy(table_file.TABLE), random.Random(seed)), allow_unicode=False)
    path.write_text(content, errors="replace")
    try:
        for cell in table.list_cells(table.load(path), [], None):
            parse(cell.raw)
            assert cell.run(Path("x")).is_relative_to("x")
    except ConfigError as error:
        assert is_short(error), str(error)

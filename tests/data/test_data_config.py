"""The `data` section of a configuration."""

import pytest
from pydantic import ValidationError

import quick_run
from pflmpi.config.load import parse
from pflmpi.data.config import DataConfig
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.stored_config import resume_config


@pytest.mark.parametrize(
    "wrong",
    [{"test_share": 0}, {"test_share": 1.0}, {"split": "random"}, {"limit": 0}, {"roots": "x"}, {"download": "maybe"}],
)
def test_a_wrong_data_section_is_refused(wrong):
    with pytest.raises(ValidationError):
        DataConfig.model_validate({"name": "digits"} | wrong)


def test_the_defaults_of_the_data_section_are_those_of_the_papers():
    config = DataConfig(name="digits")
    assert (config.split, config.test_share, config.limit, config.download) == ("auto", 0.25, None, False)


@pytest.mark.parametrize("key, value", [("label", "species"), ("client", "who"), ("layout", "nhwc")])
def test_what_is_about_a_file_is_refused_without_one(key, value):
    parse(quick_run.settings({"data": {"name": "digits", key: None}}))
    with pytest.raises(ConfigError, match=f"data.{key} is about data.path, which is not set; set it, or"):
        parse(quick_run.settings({"data": {"name": "digits", key: value}}))


def test_a_run_from_before_a_default_goes_on_with_its_own_split(tmp_path):
    quick_run.run(quick_run.settings(data={"split": "pooled"}, training={"rounds": 1}), tmp_path)
    now = parse(quick_run.settings(training={"rounds": 2}))
    assert now.data.split == "auto" and resume_config(tmp_path, now).data.split == "pooled"
    with pytest.raises(CheckpointError, match=r"data\.split = 'pooled' in the run, 'official' now"):
        resume_config(tmp_path, parse(quick_run.settings(data={"split": "official"})))


@pytest.mark.parametrize(
    "section, name",
    [
        ({"name": "digits", "path": "my.npz"}, "my"),
        ({"path": "mnist.npz"}, "mnist"),
        ({"name": "cats", "path": "my.npz"}, "cats"),
    ],
)
def test_data_of_ones_own_has_not_the_name_of_the_dataset_whose_place_it_takes(section, name):
    assert parse({**quick_run.QUICK, "data": section}).data.name == name

"""The `data` and `partition` sections of a configuration."""

import pytest
from pydantic import ValidationError

from pflmpi.data.config import DataConfig, PartitionConfig, partition_parameters, validate_partition
from pflmpi.errors import ConfigError

# --- data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"test_share": 0}, {"test_share": 1.0}, {"split": "random"}, {"limit": 0}, {"roots": "x"}, {"download": "maybe"}],
)
def test_a_wrong_data_section_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DataConfig.model_validate({"name": "digits"} | wrong)


def test_the_defaults_of_the_data_section_are_those_of_the_papers() -> None:
    config = DataConfig(name="digits")
    assert (config.split, config.test_share, config.limit, config.download) == ("pooled", 0.25, None, False)


# --- partition ----------------------------------------------------------------------------------------------


def test_a_section_becomes_a_config_with_all_defaults() -> None:
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    config = validate_partition(section)
    parameters = {"classes_per_client": 2, "alpha": 0.5, "balanced_cap": True, "min_samples": 10, "max_tries": 5000}
    assert config == PartitionConfig(name="exdir", clients=20, parameters=parameters)
    assert config.resolved() == section | parameters
    assert validate_partition(config.resolved()) == config
    assert validate_partition({"name": "iid", "clients": 3, "balanced": "false"}).parameters == {"balanced": False}


def test_writers_need_no_number_of_clients_and_others_do() -> None:
    assert validate_partition({"name": "writers"}).clients is None
    assert validate_partition({"name": "writers", "clients": 4}).clients == 4
    with pytest.raises(ConfigError, match=r"partition\.clients is missing: partition 'iid' needs it, int >= 1"):
        validate_partition({"name": "iid"})


def test_a_saved_partition_is_the_only_key() -> None:
    config = validate_partition({"path": "parts.npz"})
    assert config == PartitionConfig(path="parts.npz") and config.resolved() == {"path": "parts.npz"}
    with pytest.raises(
        ConfigError, match=r"partition\.path must be the only key.*remove partition\.clients, partition\.name"
    ):
        validate_partition({"path": "parts.npz", "name": "iid", "clients": 3})
    with pytest.raises(ConfigError, match=r"partition\.path = 3 is not a file name"):
        validate_partition({"path": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "exdri"}, "unknown partition 'exdri'; did you mean 'exdir'"),
        ({"name": None}, r"partition\.name = None is not a name; known: dirichlet, exdir"),
        ({"alhpa": 1}, "unknown key of partition 'exdir' 'alhpa'; did you mean 'alpha'"),
        ({"alpha": 0}, r"partition\.alpha = 0 is not allowed; it must be float > 0"),
        ({"alpha": "much"}, r"partition\.alpha = 'much' is not allowed; it must be float > 0"),
        ({"alpha": float("nan")}, r"partition\.alpha = nan is not allowed"),
        ({"alpha": True}, r"partition\.alpha = True is not allowed; it must be float > 0"),
        ({"clients": 0}, r"partition\.clients = 0 is not allowed; it must be int >= 1"),
        ({"clients": 2.5}, r"partition\.clients = 2\.5 is not allowed; it must be int >= 1"),
        ({"clients": None}, r"partition\.clients = None is not allowed; it must be int >= 1"),
        ({"balanced_cap": "perhaps"}, r"partition\.balanced_cap = 'perhaps' is not allowed; it must be bool"),
        ({"min_samples": 0}, r"partition\.min_samples = 0 is not allowed; it must be int >= 1"),
    ],
)
def test_a_wrong_section_is_refused_with_what_is_allowed(change: dict[str, object], message: str) -> None:
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    with pytest.raises(ConfigError, match=message):
        validate_partition(section | change)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"partition\.classes_per_client is missing.*partition\.alpha is missing"):
        validate_partition({"name": "exdir", "clients": 3})
    with pytest.raises(ConfigError, match=r"partition\.name is missing; known: .*; or give partition\.path"):
        validate_partition({"clients": 3})


def test_the_parameters_of_a_partition_can_be_printed() -> None:
    parameters = partition_parameters("lognormal")
    assert list(parameters) == ["classes_per_client", "sigma", "factor", "min_samples"]
    assert parameters["sigma"][:2] == ("float >= 0, <= 20", "required")
    assert parameters["min_samples"] == ("int >= 1", "10", "samples that every client has at least")

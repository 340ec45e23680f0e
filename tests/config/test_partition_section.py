"""The `partition` section of a configuration."""

import pytest

from pflmpi.config.load import partition
from pflmpi.data.config import PartitionConfig
from pflmpi.errors import ConfigError


def test_a_section_becomes_a_config_with_all_defaults():
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    config = partition(section)
    parameters = {"classes_per_client": 2, "alpha": 0.5, "balanced_cap": True, "min_samples": 10, "max_tries": 5000}
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
        ({"balanced_cap": "perhaps"}, r"partition\.balanced_cap = 'perhaps': must be a valid boolean"),
        ({"min_samples": 0}, r"partition\.min_samples = 0: must be greater than or equal to 1"),
    ],
)
def test_a_wrong_section_is_refused_with_what_is_allowed(change, message):
    section = {"name": "exdir", "clients": 20, "classes_per_client": 2, "alpha": 0.5}
    with pytest.raises(ConfigError, match=message):
        partition(section | change)


def test_missing_keys_are_named():
    with pytest.raises(ConfigError, match=r"partition\.classes_per_client is missing.*partition\.alpha is missing"):
        partition({"name": "exdir", "clients": 3})
    with pytest.raises(ConfigError, match=r"partition\.name is missing; known: .*; or give partition\.path"):
        partition({"clients": 3})


def test_quoted_values_are_refused_as_in_every_section():
    with pytest.raises(ConfigError, match=r"partition\.balanced = 'false': must be a valid boolean"):
        partition({"name": "iid", "clients": 3, "balanced": "false"})

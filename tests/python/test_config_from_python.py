"""`pflmpi.Config`: a configuration from keywords is the one that YAML with the same values gives."""

import numpy as np
import pytest

import pflmpi
import quick_run
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.config import load as configuration
from pflmpi.config import yaml_file
from pflmpi.config.keywords import Config
from pflmpi.errors import ConfigError
from pflmpi.learning.training import TrainingConfig
from pflmpi.models import MODELS
from project import ROOT

QUICK = {key: value for key, value in quick_run.QUICK.items() if key != "seed"}


def test_keywords_give_what_yaml_gives():
    expected = configuration.parse(quick_run.QUICK).resolved()
    assert Config(seed=3, **QUICK).resolved() == expected
    training = TrainingConfig(rounds=3, participation=0.4, epochs=1, batch_size=10, lr=0.1)
    objects = {**QUICK, "algorithm": FedGMH(), "model": MODELS["mlp"](hidden=12), "training": training}
    assert Config(seed=3, **objects).resolved() == expected
    assert Config(seed=3, **{**QUICK, "algorithm": "fedgmh"}).resolved() == expected


def test_it_goes_through_yaml_unchanged_also_with_numbers_of_numpy():
    config = Config(**{**QUICK, "seed": np.int64(3), "training": {"rounds": np.int32(2), "lr": np.float32(0.5)}})
    assert configuration.parse(yaml_file.parse(yaml_file.dump(config.resolved()), "")).resolved() == config.resolved()


def test_replace_changes_keys_or_a_whole_named_section():
    config = Config.load(ROOT / "configs" / "quickstart.yaml")
    other = config.replace(training={"rounds": 2}, algorithm="fedavg", seed=5)
    assert (other.seed, other.training.rounds, other.training.lr) == (5, 2, config.training.lr)
    assert other.resolved()["algorithm"]["name"] == "fedavg" and config.training.rounds == 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"round": 3}}, "did you mean 'rounds'"),
        ({"training": 3}, "training = 3: give its keys as a mapping"),
        ({"algorithm": "fedavgg"}, "did you mean 'fedavg'"),
        ({"seed": 1.5}, "must be a whole number"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(changes, said):
    with pytest.raises(ConfigError, match=said):
        Config(**{**QUICK, **changes})


def test_another_name_with_the_old_keys_is_refused_with_the_whole_section_to_give():
    with pytest.raises(ConfigError, match=r"'critical_share'.* -s 'algorithm=\{name: fedavg\}'$"):
        configuration.load(ROOT / "configs" / "quickstart.yaml", ["algorithm.name=fedavg"])
    given = configuration.load(ROOT / "configs" / "quickstart.yaml", ["algorithm={name: fedavg}"])
    assert given.resolved()["algorithm"]["name"] == "fedavg"


def test_an_algorithm_that_no_other_process_can_import_is_refused():
    class Mine(FedGMH):
        pass

    with pytest.raises(ConfigError, match="Mine is defined where no other process can import it; put it in a file"):
        Config(**{**QUICK, "algorithm": Mine()})


def test_the_names_of_the_package_are_listed_before_they_are_imported():
    assert {"Config", "open_run", "open_runs", "run"} <= set(dir(pflmpi))

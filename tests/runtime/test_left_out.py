"""`training.without_clients`: rounds are drawn as ever, and those clients do not take part in them."""

import numpy as np
import pytest

import quick_run
from pflmpi.errors import ConfigError
from pflmpi.store import run_folder


def settings(**training):
    return quick_run.settings(
        training={"rounds": 4, "participation": 0.6, **training}, checkpoint={"keep": 0}, evaluation={"every": 2}
    )


def participants(folder, round):
    return run_folder.read_metrics(folder, round)["participants"].tolist()


@pytest.mark.parametrize("algorithm", ["fedgmh", "fedavg", "fedfcd"])
def test_the_others_are_drawn_as_ever_and_the_bits_are_those_on_any_ranks(algorithm, tmp_path):
    quick_run.run({**settings(), "algorithm": {"name": algorithm}}, tmp_path / "all")
    raw = {**settings(without_clients=[5, 2]), "algorithm": {"name": algorithm}}
    digests = {quick_run.run(raw, tmp_path / str(ranks), ranks) for ranks in (1, 3)}
    assert len(digests) == 1
    for round in range(1, 5):
        assert participants(tmp_path / "1", round) == sorted(set(participants(tmp_path / "all", round)) - {2, 5})
        sent = run_folder.read_bytes(tmp_path / "1", round)["up"] > 0
        assert not sent[[2, 5]].any(), "nothing of them travels, not in an introduction either"
    for _, state in run_folder.read_clients(tmp_path / "1", 4, np.array([2, 5])).values():
        (_, first), *_ = run_folder.read_clients(tmp_path / "1", 0, np.array([2, 5])).values()
        assert all(np.array_equal(first[path], state[path]) for path in state if not path.startswith("answered"))
    tested = run_folder.read_metrics(tmp_path / "1", 4)["total"]
    assert tested[[2, 5]].all(), "they are tested"


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"without_clients": [7]}, r"training.without_clients has 7; the clients are 0 to 6"),
        ({"without_clients": [*range(7)]}, r"leaves nobody to train in round 1"),
        ({"without_clients": [-1]}, r"training.without_clients = .-1.: must be a list"),
        ({"without_clients": 3}, r"training.without_clients = 3"),
    ],
)
def test_a_list_that_cannot_work_is_refused_before_the_start(training, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        quick_run.run(settings(**training), tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""A run says when most of its ranks would have nothing to do."""

import pytest

import quick_run
from pflmpi.runtime.round_schedule import advise_fewer_ranks
from planned_run import planned

MANY = {"partition": {"name": "iid", "clients": 20}, "training": {"rounds": 3, "participation": 0.2}}


@pytest.mark.parametrize(
    ("ranks", "runtime", "said"),
    [
        (20, {"executor": "loop"}, "at most 4 of them at a time (4 participants); fewer ranks would be as quick"),
        (
            20,
            {"executor": "lanes", "lanes": 10},
            "in calls of up to 10); fewer ranks would be as quick, or set runtime",
        ),
        (5, {"executor": "loop"}, ""),
        (3, {"executor": "lanes", "lanes": 20}, ""),  # so few that it does not matter
    ],
)
def test_ranks_without_clients_to_train_are_counted(ranks, runtime, said):
    run = planned(quick_run.settings(**MANY, runtime=runtime), ranks)
    advice = advise_fewer_ranks(run.setup, list(run.schedule())[1:])
    assert said in advice and bool(said) == bool(advice)


def test_a_run_warns(tmp_path, caplog):
    raw = quick_run.settings(**MANY, runtime={"executor": "lanes", "lanes": 20})
    quick_run.run(raw, tmp_path / "run", ranks=5)
    assert [record.message for record in caplog.records if "fewer ranks would be as quick" in record.message]

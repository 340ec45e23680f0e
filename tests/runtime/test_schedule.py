"""The schedule says who trains, receives, is tested and is saved in each round."""

from typing import Any

import numpy as np
import pytest

import quick_run
from every_algorithm import every_algorithm
from pflmpi.learning.participation import Participation
from pflmpi.runtime.round_schedule import RoundSchedule
from planned_run import Planned, planned


def ready(name: str = "fedgmh-full", ranks: int = 3, **sections: Any) -> Planned:
    case = every_algorithm()[name]
    defaults = {"training": {**case["training"], "rounds": 7}, "checkpoint": {"every": 3}, "evaluation": {"every": 2}}
    return planned(quick_run.settings(case, **{**defaults, **sections}), ranks)


def took_part(rounds: list[RoundSchedule]) -> list[int]:
    return np.unique(np.concatenate([schedule.participants for schedule in rounds])).tolist()


def test_a_new_run_opens_with_a_checkpoint_of_everyone_and_saves_when_due():
    opening, *rounds = ready().schedule()
    assert (opening.round, opening.opening, opening.saves, opening.evaluates) == (0, True, True, False)
    assert opening.unsaved.tolist() == list(range(7)) and not len(opening.participants)
    assert [schedule.round for schedule in rounds] == list(range(1, 8))
    assert [schedule.round for schedule in rounds if schedule.saves] == [3, 6, 7], "the last round is always saved"
    assert [schedule.round for schedule in rounds if schedule.evaluates] == [2, 4, 6, 7], "and evaluated"
    for schedule, since in ((rounds[2], rounds[:3]), (rounds[3], rounds[3:4]), (rounds[6], rounds[6:])):
        assert schedule.unsaved.tolist() == took_part(since), "those that trained since the last checkpoint"


def test_clients_that_keep_nothing_are_in_no_checkpoint():
    for schedule in ready("fedavg").schedule():
        assert not len(schedule.unsaved) and all(not len(clients) for clients in schedule.rows)


def test_a_resumed_run_has_the_rounds_of_the_whole_one_and_saves_nothing_before_them():
    full = {schedule.round: schedule for schedule in ready().schedule()}
    for done in (0, 3, 6):
        opening, *rounds = ready().schedule(done)
        assert (opening.round, opening.saves, len(opening.unsaved), len(opening.participants)) == (done, False, 0, 0)
        assert opening.receivers.tolist() == full[done].receivers.tolist()
        for schedule in rounds:
            for name in ("participants", "receivers", "unsaved", "saves", "evaluates"):
                assert np.array_equal(getattr(schedule, name), getattr(full[schedule.round], name)), (
                    name,
                    schedule.round,
                )


@pytest.mark.parametrize(
    ("name", "absent", "everyone"),
    [
        ("local", "latest", False),  # predicts with what the client keeps
        ("fedgmh-full", "latest", False),
        ("fedavg", "latest", True),  # predicts with the newest reply
        ("fedavg", "last_received", False),
        ("perfedavg", "last_received", True),  # adapts with batches of the round
    ],
)
def test_those_are_tested_whose_personal_model_may_have_changed(name, absent, everyone):
    _, *rounds = ready(name, evaluation={"every": 2, "absent": absent}).schedule()
    assert all(len(schedule.tested) == 0 for schedule in rounds if not schedule.evaluates)
    assert len(rounds[1].tested) == 7, "all before the first evaluation"
    assert rounds[3].tested.tolist() == (list(range(7)) if everyone else took_part(rounds[2:4]))


def test_an_introduction_has_all_clients_and_is_counted_in_the_first_round():
    run = ready("fedfcd-full")
    up_bytes = run.setup.declared.up_bytes(np.arange(7))
    opening, first, second, *_ = run.schedule()
    assert opening.participants.tolist() == list(range(7)) and opening.uplink
    assert not opening.up_bytes.any()
    sent = [up_bytes * np.isin(np.arange(7), schedule.participants) for schedule in (first, second)]
    assert first.up_bytes.tolist() == (sent[0] + up_bytes).tolist()
    assert second.up_bytes.tolist() == sent[1].tolist()


def test_participants_are_drawn_once_for_each_round(monkeypatch):
    run, drawn, draw = ready("fedamp", evaluation={"absent": "last_received"}), [], Participation.participants

    def noted(participation: Participation, round: int) -> np.ndarray:
        drawn.append(round)
        return draw(participation, round)

    monkeypatch.setattr(Participation, "participants", noted)
    assert len(list(run.schedule())) == 8
    assert drawn == list(range(1, 8))


def test_small_messages_move_once_each_way_in_a_round():
    """Two more calls are the report, and whether all go on."""
    for ranks in (2, 3):
        settings = {"training": {"participation": 1.0, "rounds": 3}, "evaluation": {"every": 2}}
        _, *ahead = ready("fedavg", ranks, **settings).schedule()
        moved = [[traffic.down for traffic in schedule.calls if traffic.moved] for schedule in ahead]
        assert moved == [[False, True]] * 3

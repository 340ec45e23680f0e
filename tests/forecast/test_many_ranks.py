"""A forecast for many ranks: its work grows with their number, not with its square."""

import sys

import quick_run
from pflmpi.forecast.bytes import compute_state_sizes, forecast_disk
from pflmpi.forecast.forecast import compute_seconds
from pflmpi.forecast.measuring import CohortCost, Cost, Costs, ProcessMemory
from pflmpi.forecast.memory import forecast_memory
from pflmpi.forecast.ranks import lay_out
from pflmpi.messages.traffic import wire_bytes
from planned_run import planned

SAME = Cost(1.0, 1.0, 0.0)


def calls_of_functions(ranks):
    """Calls of functions, and steps of generators, for a forecast on one node."""
    raw = quick_run.settings(partition={"name": "iid", "clients": 200}, runtime={"executor": "loop"})
    world = planned(raw, ranks)
    laid_out, sizes = lay_out(world.experiment.config.runtime, ranks, 1, 0, 2), compute_state_sizes(world.experiment)
    costs = Costs(world.setup, {0: CohortCost(1, SAME, 1.0, SAME, 1)})
    count = 0

    def note(*_):
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        _, *rounds = world.schedule()
        forecast_disk(world.setup, world.experiment.config, sizes)
        compute_seconds(laid_out, 2, rounds, costs)
        assert all(sum(wire_bytes(schedule.calls)) for schedule in rounds)
        forecast_memory(world.setup, laid_out, rounds, sizes, costs, ProcessMemory(0, 0, 0, 0))
    finally:
        sys.setprofile(None)
    return count


def test_four_times_the_ranks_take_at_most_five_times_the_work():
    assert calls_of_functions(200) < 5 * calls_of_functions(50)

"""What every algorithm costs a device: launches of a training step, launches and copies of a unit; kept as a table."""

import csv
from dataclasses import asdict, dataclass, fields

import stub_run
from counts import Counts
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.learning import replay
from project import GOLDEN

TABLE = GOLDEN / "gpu_costs.csv"
RENEW = "python benchmarks/launches.py --write tests/golden/gpu_costs.csv"


@dataclass(frozen=True)
class Costs:
    """Figures for one unit: the clients that are computed together, a single one in a loop.

    Attributes:
        step: launches of a training step.
        step_copies: its copies to and from the device, and waits for a value of the device.
        unit: launches of a unit's training around its steps.
        unit_up, unit_down: its copies to and from the device.
        test: launches of its evaluation, or of that of all clients where they share a model; with `test_up` and
            `test_down`.
        round_up: copies to the device between the units of a round.
    """

    step: int
    step_copies: int
    unit: int
    unit_up: int
    unit_down: int
    test: int
    test_up: int
    test_down: int
    round_up: int


NAMES = tuple(field.name for field in fields(Costs))
# What an algorithm costs shows on `mlp`, which every case has; what layers cost, on these and every model.
ON_EVERY_MODEL = (*MESSAGE_KINDS, "ditto", "pfedcfr", "apfl")


def situations():
    """Case, model and executor of what is kept."""
    return [
        (case, model, executor)
        for model in stub_run.MODELS
        for executor in ("loop", "lanes")
        for case in every_algorithm()
        if model == "mlp" or (case in ON_EVERY_MODEL and (model, executor) != ("resnet18", "lanes"))
    ]


def measure(case, model, executor):
    """A round with two steps on the stub device, none replayed, and its costs, by the difference to three steps."""
    sections = every_algorithm()[case]
    with replay.without_replay():
        two, three = (stub_run.run(stub_run.settings(sections, model, executor, steps), True) for steps in (2, 3))
    step = _each(three.counts["update"] - two.counts["update"], two.units)
    unit, test = _each(two.counts["update"], two.units), _each(two.counts["evaluate"], two.tests)
    return two, Costs(
        step=step.launches,
        step_copies=step.uploads + step.downloads + step.syncs,
        unit=unit.launches - 2 * step.launches,
        unit_up=unit.uploads,
        unit_down=unit.downloads + unit.syncs - 2 * step.syncs,
        test=test.launches,
        test_up=test.uploads,
        test_down=test.downloads + test.syncs,
        round_up=two.counts[""].uploads,
    )


def read():
    """The kept figures by case, model and executor."""
    with TABLE.open() as file:
        return {
            (row["case"], row["model"], row["executor"]): Costs(**{name: int(row[name]) for name in NAMES})
            for row in csv.DictReader(file)
        }


def write(path, costs):
    """Write figures as `read` has them."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "model", "executor", *NAMES])
        writer.writerows([*key, *asdict(cost).values()] for key, cost in costs.items())


def _each(counts, units):
    assert all(number % units == 0 for number in counts.row()), "units cost the same"
    return Counts(*(number // units for number in counts.row()))

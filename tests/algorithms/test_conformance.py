"""What every algorithm must keep: the same bits everywhere, exact continuation, only what was declared travels."""

import shutil
from functools import cache

import pytest

import exported
import quick_run
import small_task
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.algorithms import ALGORITHMS
from pflmpi.config import load as configuration
from pflmpi.testing import conformance
from pflmpi.testing.conformance import EXECUTORS, Runs

CASES = every_algorithm()
ABSENT = {
    name: "last_received" if ALGORITHMS[case["algorithm"]["name"]].predicts_with else "latest"
    for name, case in CASES.items()
}
# On several ranks each case runs client by client or in lanes, by turns; those with all kinds of messages do both.
EXECUTOR = {name: EXECUTORS[place % 2] for place, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of a case; each is made once."""
    return cache(
        lambda case: Runs({**CASES[case], "evaluation": {"absent": ABSENT[case]}}, tmp_path_factory.mktemp(case))
    )


@pytest.mark.parametrize(
    "case, executor, ranks, server",
    [(case, EXECUTOR[case], 3, "auto") for case in MESSAGE_KINDS]
    + [(case, EXECUTORS[EXECUTOR[case] == "loop"], 2, "auto") for case in MESSAGE_KINDS]
    + [(case, "loop", 5, ("auto", "dedicated")[place % 2]) for place, case in enumerate(MESSAGE_KINDS)],
)
def test_same_bits_on_any_number_of_ranks(case, executor, ranks, server, runs):
    conformance.same_bits(runs(case), executor, ranks, server)


def test_every_kind_of_message_is_among_those_on_more_ranks():
    def kinds(case):
        algorithm = configuration.parse(quick_run.settings(CASES[case])).algorithm
        messages = [*algorithm.uplink(small_task.task()).values(), *algorithm.downlink(small_task.task()).values()]
        return {*map(type, messages), *(["introduces"] if algorithm.introduces else [])}

    assert set().union(*map(kinds, MESSAGE_KINDS)) == set().union(*map(kinds, CASES))


@pytest.mark.parametrize("case, absent", [*ABSENT.items(), ("fedavg", "latest"), ("fedproto", "latest")])
def test_a_continued_run_has_the_bits_of_an_unbroken_one(case, absent, runs):
    conformance.exact_continuation(runs(case), absent, EXECUTOR[case])


@pytest.mark.parametrize("case", CASES)
def test_loop_and_lanes_agree_within_rounding(case, runs):
    conformance.loop_and_lanes_agree(runs(case))


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_are_the_batch_or_are_refused(case, runs):
    conformance.micro_batches_are_the_batch(runs(case))


@pytest.mark.parametrize("options", [{"name": "pfedpm"}, {"name": "fedproto", "loss_on": "means"}], ids=str)
def test_without_its_term_of_class_means_a_loss_takes_micro_batches(options, tmp_path):
    without = Runs({"algorithm": {**options, "prototype_weight": 0.0}}, tmp_path)
    assert not without.experiment().config.algorithm.needs_whole_batch
    conformance.micro_batches_are_the_batch(without)


@pytest.mark.parametrize("case", CASES)
def test_newcomers_are_the_same_in_loop_and_lanes(case, runs):
    conformance.newcomers_agree(runs(case))


@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_the_declared_ones(case, runs):
    conformance.declared_bytes(runs(case), EXECUTOR[case])


@pytest.mark.parametrize("case", CASES)
def test_the_exported_model_is_right_as_often_as_in_the_run(case, runs):
    exported.check_models(runs(case).get("loop")[0])


def test_algorithms_and_variants_differ_from_each_other(runs):
    """Otherwise equal digests would say little."""
    cases = CASES.keys() - {"fedavg_ft"}  # whose state is FedAvg's: what it fine-tunes is not kept
    assert len({runs(case).get("loop")[1] for case in cases}) == len(cases)
    assert runs("fedavg_ft").get("loop")[1] == runs("fedavg").get("loop")[1]


def test_another_seed_gives_another_digest(tmp_path):
    first = quick_run.run(quick_run.settings(), tmp_path / "a")
    assert quick_run.run(quick_run.settings(), tmp_path / "b") == first
    assert quick_run.run(quick_run.settings(seed=4), tmp_path / "c") != first


@pytest.mark.parametrize("name", ["fedgmh-full", "fedfcd-full"])  # fedfcd's clients introduce themselves once
def test_a_run_killed_in_its_first_round_continues(name, tmp_path):
    case = every_algorithm()[name]
    rounds = {count: quick_run.settings(case, training={**case["training"], "rounds": count}) for count in (0, 2)}
    quick_run.run(rounds[0], tmp_path / "killed")
    assert quick_run.resume(tmp_path / "killed", ("training.rounds=2",)) == quick_run.run(rounds[2], tmp_path / "whole")


def test_continuing_a_finished_run_changes_nothing(tmp_path):
    first = quick_run.run(quick_run.settings(), tmp_path / "a")
    before = (tmp_path / "a" / "metrics.csv").read_text()
    assert quick_run.resume(tmp_path / "a", ranks=2) == first
    assert (tmp_path / "a" / "metrics.csv").read_text() == before


def test_a_run_can_be_moved_and_continued(tmp_path):
    digest = quick_run.run(quick_run.settings(training={"rounds": 4}), tmp_path / "whole")
    quick_run.run(quick_run.settings(training={"rounds": 2}), tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert quick_run.resume(tmp_path / "b", ("training.rounds=4",)) == digest

"""Who takes part in a round and how much of its work a client can do, against the definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch

import quick_run
from pflmpi import tree
from pflmpi.analysis.run import open_run
from pflmpi.config import load as configuration
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.build import prepare
from pflmpi.learning.participation import Participation
from pflmpi.learning.task import HOST
from pflmpi.learning.training import TrainingConfig
from pflmpi.rng import stream
from planned_run import planned

SIZES = np.array([1, 1, 1, 1, 96])


def participation(num_train=SIZES, **training):
    return Participation(TrainingConfig(participation=0.4, **training), 3, num_train)


# --- rules --------------------------------------------------------------------------------------------------


def test_the_uniform_rule_is_the_draw_of_a_sample():
    for round in range(1, 20):
        drawn = stream(3, round, -1, "participants").choice(5, size=2, replace=False)
        assert participation().participants(round).tolist() == sorted(drawn.tolist())


def test_by_samples_draws_in_proportion_to_samples():
    rounds = participation(selection="by_samples")
    chosen = [rounds.participants(round).tolist() for round in range(1, 301)]
    assert all(len(set(clients)) == 2 for clients in chosen)
    assert sum(4 in clients for clients in chosen) > 290, "its first draw alone has a probability of 0.96"
    counts = np.bincount(np.concatenate(chosen), minlength=5)[:4]
    assert counts.min() > 45, "the others share the second place"


def test_round_robin_goes_through_the_clients():
    rounds = participation(selection="round_robin")
    assert [rounds.participants(round).tolist() for round in (1, 2, 3, 4)] == [[0, 1], [2, 3], [0, 4], [1, 2]]


def test_rounds_are_counted_in_any_order():
    rounds, expected = participation(selection="by_samples"), np.zeros((8, 5), np.int64)
    for round in range(1, 8):
        expected[round] = expected[round - 1]
        expected[round][rounds.participants(round)] += 1
    for round in (2, 3, 7, 7, 1, 5, 0):
        counts = rounds.counts(round)
        assert counts.tolist() == expected[round].tolist(), round
        counts += 1  # the caller's own


def test_a_trace_says_who_takes_part(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n1,4\n1,0\n3,2\n")
    rounds = Participation(TrainingConfig(selection=str(trace)), 3, SIZES)
    assert [rounds.participants(round).tolist() for round in (1, 3)] == [[0, 4], [2]]
    with pytest.raises(ConfigError, match=r"trace\.csv: round 2 has nobody; expected ids of clients, 0 to 4"):
        rounds.participants(2)


@pytest.mark.parametrize(
    "text,problem",
    [
        ("round,client\n1,5\n", "round 1 has client 5; expected ids of clients, 0 to 4"),
        ("round,client\n1,2\n1,2\n", "round 1 has client 2 twice; expected ids of clients"),
        ("round,who\n1,2\n", "cannot be read (KeyError('client'))"),
        ("round,client\n1,x\n", "cannot be read (ValueError("),
    ],
)
def test_a_wrong_trace_is_refused(text, problem, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Participation(TrainingConfig(selection=str(trace)), 3, SIZES).participants(1)
    assert problem in str(refused.value)


def test_each_that_was_drawn_drops_out_with_the_given_probability():
    rounds, drawn = participation(np.ones(100), dropout=0.3), participation(np.ones(100))
    left = []
    for round in range(1, 101):
        draws = stream(3, round, -1, "dropout").random(40)
        assert rounds.participants(round).tolist() == drawn.participants(round)[draws >= 0.3].tolist()
        left.append(len(rounds.participants(round)))
    assert np.mean(left) == pytest.approx(28, abs=1)


def test_one_stays_where_all_would_drop_out():
    rounds = participation(dropout=0.99)
    assert {len(rounds.participants(round)) for round in range(1, 30)} == {1}


def test_slow_clients_have_few_steps_or_no_part():
    rounds = participation(np.ones(2000), step_seconds=0.5, step_spread=0.8, deadline=2.0)
    seconds = 0.5 * np.exp(0.8 * stream(3, 0, -1, "speed").standard_normal(2000))
    assert np.array_equal(rounds.seconds_per_step, seconds)
    assert np.array_equal(rounds.most_steps, np.floor(2.0 / seconds))
    drawn = participation(np.ones(2000)).participants(1)
    assert rounds.participants(1).tolist() == drawn[seconds[drawn] <= 2.0].tolist()
    assert np.median(rounds.seconds_per_step) == pytest.approx(0.5, rel=0.1)


def test_a_deadline_of_three_steps_has_room_for_three():
    assert participation(step_seconds=0.1, deadline=0.3).most_steps.tolist() == [3] * 5


def test_who_is_too_slow_is_not_the_one_that_stays():
    rounds = participation(np.ones(50), step_seconds=1.0, step_spread=2.0, deadline=1.0, dropout=0.999)
    for round in range(1, 40):
        (client,) = rounds.participants(round)
        assert rounds.most_steps[client] > 0


# --- in a run -----------------------------------------------------------------------------------------------

SLOW = {"step_seconds": 1.0, "step_spread": 0.7, "deadline": 3.0, "dropout": 0.2, "participation": 0.8}


def settings(name="fedavg", executor="loop", **training):
    sections = {"training": {"epochs": 2, "batch_size": 10, **training}, "runtime": {"executor": executor, "lanes": 3}}
    return quick_run.settings(algorithm={"name": name}, **sections)


@pytest.mark.parametrize("name", ["fednova", "scaffold", "fedgmh"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_ranks_and_a_resumed_run_have_the_same_bits(name, executor, tmp_path):
    raw = settings(name, executor, **SLOW)
    digest = quick_run.run(raw, tmp_path / "one")
    assert quick_run.run(raw, tmp_path / "three", ranks=3) == digest
    quick_run.run(settings(name, executor, **SLOW, rounds=1), tmp_path / "short")
    assert quick_run.resume(tmp_path / "short", ("training.rounds=3",), ranks=2) == digest
    columns = open_run(tmp_path / "one").columns
    assert (columns["simulated_seconds"] > 0).all() and (columns["simulated_seconds"] <= 3).all()


def executor_of(raw):
    return planned(raw, 1).setup.executor


def test_a_client_takes_the_first_of_its_steps():
    partial, full, cut = executor_of(settings(**SLOW)), executor_of(settings()), list[bool]()
    for client in range(7):
        length = full.passes(np.array([client]), 1)["train"]
        steps = full.order(client, 1, "train", length, {})
        most = int(partial.participation.most_steps[client])
        partial_steps = partial.order(client, 1, "train", length, {})
        assert len(partial_steps) == min(most, len(steps))
        assert all(np.array_equal(*batches) for batches in zip(partial_steps, steps, strict=False))
        cut.append(0 < len(partial_steps) < len(steps))
    assert any(cut) and not all(cut)


def repeated(value, count):
    return tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), value)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_fednova_and_scaffold_go_by_the_steps_that_were_taken(executor):
    for name in ("fednova", "scaffold"):
        computes = executor_of(settings(name, executor, **SLOW))
        algorithm, task, most = computes.algorithm, computes.tasks[0], computes.participation.most_steps
        clients = np.flatnonzero(most)
        full_steps = np.array([task.training.num_steps(int(size)) for size in computes.federation.num_train])[clients]
        steps = torch.tensor(np.minimum(most[clients], full_steps))
        assert len(steps.unique()) > 1 and (steps.numpy() < full_steps).any()
        server = algorithm.init_server(task)
        received = algorithm.publish(task, server, clients)
        rows = {key: repeated(value, len(clients)) for key, value in received.items()}
        client = repeated(algorithm.init_client(task), len(clients))
        result = computes.update(clients, client, rows, 1)()
        if name == "fednova":
            assert result.up["steps"]["gradients"].tolist() == steps.tolist()
            continue
        moved = received["model"]["head"]["bias"] - result.up["model"]["head"]["bias"]
        slope = moved / (steps.unsqueeze(1) * task.training.learning_rate(1))
        torch.testing.assert_close(result.states["control"]["head"]["bias"], slope, rtol=1e-5, atol=1e-6)


def test_the_round_lasts_until_the_slowest_has_taken_its_steps(tmp_path):
    raw = settings(step_seconds=1.0, step_spread=0.7)
    executor = executor_of(raw)
    quick_run.run(raw, tmp_path / "run")
    run = open_run(tmp_path / "run")
    for round, seconds in zip(run.columns["round"].tolist(), run.columns["simulated_seconds"].tolist(), strict=True):
        expected = [
            2 * -(-int(executor.federation.num_train[client]) // 10) * executor.participation.seconds_per_step[client]
            for client in executor.participation.participants(round)
        ]
        assert seconds == pytest.approx(max(expected), abs=1e-4)
    assert float(run.round().metrics["seconds_simulated"]) == pytest.approx(max(expected))


def test_where_all_are_as_fast_a_deadline_is_a_number_of_steps(tmp_path):
    quick_run.run(settings(executor="lanes", step_seconds=1.0, deadline=2.5), tmp_path / "one")
    quick_run.run(settings(executor="lanes", steps=2, epochs=1), tmp_path / "two")
    weights = [np.asarray(open_run(tmp_path / name).round().server["model/head/weight"]) for name in ("one", "two")]
    assert np.array_equal(*weights)


OWN = """
import numpy as np

def mine(round, count, num_train, rng):
    return rng.permutation(len(num_train))[:count] if round % 2 else num_train.argsort()[-count:]

def twice(round, count, num_train, rng):
    return num_train * 0

def changing(round, count, num_train, rng):
    num_train[:] = 0
    return num_train

def unseeded(round, count, num_train, rng):
    return np.random.default_rng().permutation(len(num_train))[:count]

def failing(round, count, num_train, rng):
    return 1 / 0
"""


def test_a_rule_of_ones_own_is_part_of_the_run(tmp_path):
    code = tmp_path / "rules.py"
    code.write_text(OWN)
    raw = settings(selection=f"{code}:mine", participation=0.3)
    digest = quick_run.run(raw, tmp_path / "one")
    assert quick_run.run(raw, tmp_path / "two", ranks=2) == digest
    run, sizes = open_run(tmp_path / "one"), executor_of(raw).federation.num_train
    assert run.round(2).metrics["participants"].tolist() == sorted(sizes.argsort()[-2:].tolist())
    code.write_text(OWN + "# changed\n")
    with pytest.raises(CheckpointError, match="the code of selection/0 has changed"):
        quick_run.resume(tmp_path / "one", ("training.rounds=4",))


def test_a_rule_that_is_edited_during_a_run_stays_what_it_was(tmp_path):
    code = tmp_path / "rules.py"
    code.write_text(OWN)
    rule = participation(selection=f"{code}:mine")
    before = rule.participants(2)
    code.write_text(OWN.replace("[-count:]", "[:count]"))
    assert np.array_equal(rule.participants(2), before)
    assert not np.array_equal(participation(selection=f"{code}:mine").participants(2), before)


def test_a_trace_that_has_changed_is_another_run(tmp_path, monkeypatch):
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n" + "".join(f"{round},{round % 5}\n{round},6\n" for round in range(1, 6)))
    monkeypatch.chdir(tmp_path)
    raw = settings(selection="trace.csv", participation=1.0)
    quick_run.run(raw, tmp_path / "run")
    assert open_run(tmp_path / "run").round(3).metrics["participants"].tolist() == [3, 6]
    monkeypatch.chdir("/")
    quick_run.resume(tmp_path / "run", ("training.rounds=4",))
    trace.write_text(trace.read_text().replace("5,0", "5,1"))
    with pytest.raises(CheckpointError, match="selection/0 has changed"):
        quick_run.resume(tmp_path / "run", ("training.rounds=5",))


@pytest.mark.parametrize(
    "name,training,problem",
    [
        ("fedavg", {"deadline": 3.0}, "training.deadline = 3.0 has an effect with training.step_seconds only"),
        ("fedavg", {"step_spread": 0.5}, "training.step_spread = 0.5 has an effect with training.step_seconds only"),
        ("fedrep", {"deadline": 3.0, "step_seconds": 1.0}, r"FedRep trains in 2 passes \(head, body\); leave it out"),
        ("l2gd", {"deadline": 3.0, "step_seconds": 1.0}, "the local update of L2GD assumes all of its steps"),
        ("fedavg", {"deadline": 0.1, "step_seconds": 1.0}, "nobody to train in round 1; raise training.deadline"),
        ("fedavg", {"selection": "unifrom"}, "unknown selection 'unifrom'; did you mean 'uniform'"),
        ("fedavg", {"selection": "no.csv", "participation": 1.0}, "no.csv' cannot be read .*expected a CSV file"),
        ("fedavg", {"selection": "no.csv", "participation": 0.5}, "participation = 0.5 has an effect with a training"),
        ("fedavg", {"selection": "{code}:twice"}, "twice: round 1 has client 0 twice; "),
        ("fedavg", {"selection": "{code}:failing"}, r"rules\.py:18, in failing: ZeroDivisionError"),
        ("fedavg", {"selection": "{code}:changing"}, r"in changing: ValueError: .* read-only"),
        ("fedavg", {"selection": "{code}:unseeded", "rounds": 9}, "returns other clients at a second call; it must"),
        ("fedavg", {"dropout": 1.0}, "training.dropout = 1.0"),
    ],
)
def test_what_has_no_meaning_is_refused_at_the_start(name, training, problem, tmp_path):
    code = tmp_path / "rules.py"
    code.write_text(OWN)
    values = {key: value.format(code=code) if isinstance(value, str) else value for key, value in training.items()}
    with pytest.raises(ConfigError, match=problem):
        prepare(configuration.parse(settings(name, **values)), HOST)
    assert not Path("no.csv").exists()

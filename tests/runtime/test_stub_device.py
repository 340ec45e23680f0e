"""Every algorithm, executor and model on a device that is not there: the host's values, and no more work than kept."""

from unittest import mock

import numpy as np
import pytest
import torch

import failing_clients
import stub_costs
import stub_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from fake_streams import FakeStream, Timeline, fake_streams
from pflmpi import tree
from pflmpi.errors import AlgorithmError
from pflmpi.learning import client, replay
from pflmpi.messages.kinds import Messages
from pflmpi.runtime import client_errors, evaluation, rounds
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import Update, run_pipelined
from stub_device import DEVICE, stub_device

_ALSO_IN_A_LOOP = {*MESSAGE_KINDS, "fedcp", "pfedme", "perfedavg"}  # noise, inner steps, an adaptation


def _is_quick(case, model, executor):
    """Whether the default suite has it: all in lanes of a perceptron, and of everything else one or a few."""
    if model == "resnet18":  # seconds each
        return False
    return case == "fedavg" or (model == "mlp" and (executor == "lanes" or case in _ALSO_IN_A_LOOP))


def _marked():
    return [
        pytest.param(*situation, id="-".join(situation), marks=[] if _is_quick(*situation) else [pytest.mark.slow])
        for situation in stub_costs.situations()
    ]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("case", "model", "executor"), _marked())
def test_a_device_gives_what_the_host_gives_and_does_no_more_than_kept(case, model, executor):
    result, costs = stub_costs.measure(case, model, executor)
    expected = stub_run.run(stub_run.settings(every_algorithm()[case], model, executor), False)
    for path, leaf in expected.values.items():
        torch.testing.assert_close(
            result.values[path], leaf, rtol=0, atol=0, msg=lambda text, path=path: f"{path}: {text}"
        )
    assert costs.step_copies == 0, "a step copies between host and device, or waits for a value"
    kept = stub_costs.read().get((case, model, executor))
    assert kept is not None, f"no figures are kept; add them: {stub_costs.RENEW}"
    more = {name for name in stub_costs.NAMES if getattr(costs, name) > getattr(kept, name)}
    assert not more, (
        f"{case} on {model} in {executor} costs a device more than kept in {stub_costs.TABLE.name}: {sorted(more)}; "
        f"found {costs}, kept {kept}; if that must be, renew the figures: {stub_costs.RENEW}"
    )


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_cached_features_are_those_of_the_host(executor):
    raw = stub_run.settings(every_algorithm()["fedavg"], "cnn", executor)
    raw["model"] = {**raw["model"], "trainable": ["head.*"], "cache_features": True}
    expected, actual = (stub_run.run(raw, on_stub).values for on_stub in (False, True))
    for path, leaf in expected.items():
        assert torch.equal(leaf, actual[path]), path


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize(
    ("case", "uplink"),
    [("fedavg", {"clip": 0.1, "noise": 0.1, "top_k": 0.1, "quantise": 8}), ("fedproto", {"quantise": 4})],
)
def test_messages_are_transformed_there_as_on_the_host(case, uplink, executor):
    raw = {**stub_run.settings(every_algorithm()[case], "mlp", executor), "uplink": uplink}
    expected, actual = (stub_run.run(raw, on_stub).values for on_stub in (False, True))
    for path, leaf in expected.items():
        assert torch.equal(leaf, actual[path]), path


@pytest.mark.parametrize(
    ("case", "model", "executor", "trainable"),
    [
        ("fedgmh-full", "mlp", "lanes", None),
        ("fedgmh-full", "mlp", "lanes", ["head.*"]),
        ("fedavg", "cnn", "loop", ["fc1.*", "head.*"]),
        ("fedcp", "mlp", "loop", None),
        pytest.param("fedavg", "resnet18", "loop", None, marks=pytest.mark.slow),
    ],
)
def test_a_device_replays_steps_and_does_no_more_than_by_taking_them(case, model, executor, trainable):
    raw = stub_run.settings(every_algorithm()[case], model, executor, steps=12)
    raw["model"] = {**raw["model"], "trainable": trainable}
    replay._traces.cache_clear()
    with mock.patch.object(replay.Steps, "_run", autospec=True, side_effect=replay.Steps._run) as runs:
        replayed = stub_run.run(raw, True)
    with replay.without_replay():
        unreplayed = stub_run.run(raw, True)
    for path, leaf in stub_run.run(raw, False).values.items():
        torch.testing.assert_close(replayed.values[path], leaf, rtol=0, atol=0)
    assert runs.call_count == (12 if executor == "lanes" else stub_run.CLIENTS * 12) - 2, "all but two that are traced"
    counts, limit = replayed.counts["update"], unreplayed.counts["update"]
    assert counts.syncs == 0 and counts.launches <= limit.launches and counts.uploads == limit.uploads


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_messages_for_which_a_device_has_no_room_wait_on_the_host(executor, monkeypatch):
    raw = stub_run.settings(every_algorithm()["fedavg"], "mlp", executor)
    on_device = stub_run.run(raw, True)
    size = 4 * sum(leaf.numel() for path, leaf in on_device.values.items() if path.startswith("server/"))
    monkeypatch.setattr(rounds, "device_message_limit", lambda _: 1.5 * size)  # one client in a loop, no lanes
    limited = stub_run.run(raw, True)
    for path, leaf in stub_run.run(raw, False).values.items():
        torch.testing.assert_close(on_device.values[path], leaf, rtol=0, atol=0)
        torch.testing.assert_close(limited.values[path], leaf, rtol=0, atol=0)
    more = limited.counts[""].downloads - on_device.counts[""].downloads
    assert more == (2 if executor == "loop" else 1), "one copy for each"


def test_a_device_tests_a_shared_model_on_as_many_samples_at_a_time_as_are_configured(monkeypatch):
    raw = stub_run.settings(every_algorithm()["fedavg"], "mlp", "loop")
    once = stub_run.run(raw, True).counts["evaluate"]
    monkeypatch.setattr(evaluation, "_MIN_BATCH", 8)  # a third of all, as many as a client has
    on_device, host = stub_run.run(raw, True), stub_run.run(raw, False)
    assert on_device.counts["evaluate"] == once and torch.equal(on_device.values["correct"], host.values["correct"])
    raw["evaluation"] = {"batch_size": 8}
    assert stub_run.run(raw, True).counts["evaluate"].launches > once.launches


@pytest.mark.parametrize("how", ["bad_message", "bad_state"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_client_that_diverges_on_a_device_is_left_out(executor, how, monkeypatch):
    section = failing_clients.registered(monkeypatch, round=1, **{how: 1})
    raw = stub_run.settings({"algorithm": section}, "mlp", executor)
    raw["runtime"] |= {"client_errors": "skip"}
    actual, right = stub_run.run(raw, True).values, stub_run.run(raw, False).values
    plain = stub_run.run(stub_run.settings(every_algorithm()["fedavg"], "mlp", executor), False).values
    for path, leaf in right.items():
        torch.testing.assert_close(actual[path], leaf, rtol=0, atol=0)
    assert any(not torch.equal(right[path], leaf) for path, leaf in plain.items() if path.startswith("server/"))


def test_clients_are_computed_one_by_one_after_an_error_with_what_they_received_on_a_device():
    def update(clients, states, down, round):
        if len(clients) > 1 or clients[0] == 5:
            raise AlgorithmError("client_update") from ValueError("its data is odd")
        up = {"model": {"w": tree.leaf(down["model"], "w") + 1}}
        return lambda: Update({}, up, torch.zeros(1, dtype=torch.float64), True)

    with stub_device():
        down: Messages = {"model": {"w": torch.arange(6.0, device=DEVICE).view(3, 2)}}
        executor = mock.Mock(update=update)
        done = client_errors.update_group(executor, np.array([3, 5, 8]), {}, down, 1, skip=True)()
    assert done.clients.tolist() == [3, 8] and [*done.failed] == [5]
    assert tree.leaf(done.up["model"], "w").tolist() == [[1, 2], [5, 6]]


def _costs(executor):
    return stub_costs.measure("fedavg", "mlp", executor)[1]


def _planted(monkeypatch, change):
    """Change the logits in every loss."""
    cross_entropy = client.cross_entropy
    monkeypatch.setattr(client, "cross_entropy", lambda logits, batch: cross_entropy(change(logits), batch))


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits + torch.zeros(10), lambda logits: logits[:, torch.arange(10)]],
    ids=["tensor", "index"],
)
def test_a_tensor_made_without_the_device_is_found(change, monkeypatch):
    _planted(monkeypatch, change)
    with pytest.raises(AlgorithmError, match="same device, but found stub:0 and cpu"):
        _costs("loop")


@pytest.mark.parametrize(
    "slow",
    [
        lambda logits: logits * float(logits.detach().sum()),
        lambda logits: logits if logits.detach().isfinite().all() else -logits,
        lambda logits: logits * len(logits.detach().nonzero()),
        lambda logits: logits * len(logits.detach()[logits.detach() > 0]),
        lambda logits: logits + torch.zeros(10, device=logits.device).copy_(torch.zeros(10)),
        lambda logits: logits * torch.tensor(1.0, device=logits.device),
        lambda logits: logits + torch.from_numpy(np.zeros(10, np.float32)).to(logits.device),
        lambda logits: logits.cpu().to(logits.device),
    ],
    ids=["float", "if", "nonzero", "mask", "copy_", "tensor", "from_numpy", "there and back"],
)
def test_a_copy_or_wait_in_a_step_is_found(slow, monkeypatch):
    _planted(monkeypatch, slow)
    assert _costs("loop").step_copies > 0


def test_another_launch_in_a_step_is_found(monkeypatch):
    before = _costs("lanes")
    _planted(monkeypatch, lambda logits: logits + 1)
    after = _costs("lanes")
    assert (after.step, after.unit) == (before.step + 1, before.unit)


def test_the_device_refuses_what_a_gpu_refuses():
    with stub_device() as stub:
        tensor = torch.ones(2, 2, device=DEVICE)
        for refused in (tensor.numpy, lambda: torch.cat([tensor, torch.ones(2, 2)]), lambda: tensor @ torch.ones(2, 2)):
            with pytest.raises((RuntimeError, TypeError)):
                refused()
        assert (tensor + torch.tensor(1.0)).cpu().tolist() == [[2, 2], [2, 2]], "a single number may be on the host"
        assert stub.counts.row() == (2, 0, 1, 0)  # ones, add; the download


def run(case, executor):
    """A round of three groups on the stub device with streams, the same on the host, and what happened."""
    raw = stub_run.settings(every_algorithm()[case], "mlp", executor)
    raw["runtime"]["lanes"] = 1
    with fake_streams() as timeline:

        def noted(self, *args):
            timeline.log.append("begin")
            return update(self, *args)

        update = Executor.update
        with mock.patch.object(Executor, "update", noted):
            result = stub_run.run(raw, True)
    return result, stub_run.run(raw, False), timeline


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("case", ["fedavg", "fedproto", "ditto", "fedgmh-full"])
def test_a_group_is_begun_before_the_one_before_is_waited_for(case, executor):
    torch.set_num_threads(1)
    result, expected, timeline = run(case, executor)
    assert timeline.races == []
    for path, leaf in expected.values.items():
        torch.testing.assert_close(result.values[path], leaf, rtol=0, atol=0)
    first = timeline.log.index("begin")
    group = ["begin", "up", "down"]
    assert timeline.log[first : first + 12] == [*group, *group, "wait", *group, "wait", "wait"]
    assert timeline.up.waits == set(), "what goes up waits for no results"


def test_unseen_clients_are_begun_before_those_before_are_waited_for():
    torch.set_num_threads(1)
    raw = stub_run.settings(every_algorithm()["fedper"], "mlp", "loop")
    raw["runtime"]["lanes"], raw["evaluation"] = 1, {"unseen": 0.67}  # two of three
    evaluate_unseen = rounds.evaluate_unseen
    with fake_streams() as timeline:

        def noted(*args):
            timeline.log.append("unseen")
            return evaluate_unseen(*args)

        with mock.patch.object(rounds, "evaluate_unseen", noted):
            stub_run.run(raw, True)
    assert timeline.races == []
    first = timeline.log.index("unseen")
    joins, test = ["up", "down", "wait"], ["up", "down"]  # a newcomer trains its head before it is tested
    assert timeline.log[first:] == ["unseen", *joins, *test, *joins, *test, "wait", "wait"]


def _forgetting(name):
    wait_stream = FakeStream.wait_stream
    return lambda self, stream: None if self.name == name else wait_stream(self, stream)


@pytest.mark.parametrize("queue", ["computing", "down", "host"])
def test_a_queue_that_does_not_wait_is_found(queue):
    torch.set_num_threads(1)
    with mock.patch.object(FakeStream, "wait_stream", _forgetting(queue)):
        _, _, timeline = run("ditto", "lanes")
    assert any(f"on {queue} does not wait" in race for race in timeline.races)


def test_memory_that_is_given_away_too_early_is_found():
    torch.set_num_threads(1)
    with mock.patch.object(Timeline, "keep", lambda *_: None):
        _, _, timeline = run("ditto", "lanes")
    races = " ".join(timeline.races)
    assert "of up may be given away before computing" in races and "of computing may be given away before down" in races


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0, "b0 w0 b1 w1 b2 w2"), (1, "b0 b1 w0 b2 w1 w2"), (5, "b0 b1 b2 w0 w1 w2")]
)
def test_as_many_are_begun_ahead_as_asked(ahead, expected):
    log: list[str] = []

    def begin(number):
        log.append(f"b{number}")
        return lambda: log.append(f"w{number}") or number

    assert list(run_pipelined(map(begin, range(3)), ahead)) == [0, 1, 2]
    assert log == expected.split()

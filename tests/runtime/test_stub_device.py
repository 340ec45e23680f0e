"""Every algorithm, executor and model on a device that is not there: the host's values, and no more work than kept."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

import stub_costs
import stub_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi.errors import AlgorithmError
from pflmpi.learning import client, recording, replay
from pflmpi.learning.recording import Program
from stub_device import DEVICE, stub_device

_ALSO_IN_A_LOOP = {*MESSAGE_KINDS, "fedcp", "pfedme", "perfedavg"}  # noise, inner steps, an adaptation


def _is_quick(case: str, model: str, executor: str) -> bool:
    """Whether the default suite has it: all in lanes of a perceptron, and of everything else one or a few."""
    if model == "resnet18":  # seconds each
        return False
    return case == "fedavg" or (model == "mlp" and (executor == "lanes" or case in _ALSO_IN_A_LOOP))


def _marked() -> list[object]:
    return [
        pytest.param(*one, id="-".join(one), marks=[] if _is_quick(*one) else [pytest.mark.slow])
        for one in stub_costs.situations()
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("case", "model", "executor"), _marked())
def test_a_device_gives_what_the_host_gives_and_does_no_more_than_kept(case: str, model: str, executor: str) -> None:
    found, costs = stub_costs.measure(case, model, executor)
    expected = stub_run.run(stub_run.settings(every_algorithm()[case], model, executor), False)
    for path, leaf in expected.values.items():
        torch.testing.assert_close(
            found.values[path], leaf, rtol=0, atol=0, msg=lambda text, path=path: f"{path}: {text}"
        )
    assert costs.step_copies == 0, "a step copies between host and device, or waits for a value"
    kept = stub_costs.read().get((case, model, executor))
    assert kept is not None, f"no figures are kept; add them: {stub_costs.RENEW}"
    more = {name for name in stub_costs.NAMES if getattr(costs, name) > getattr(kept, name)}
    assert not more, (
        f"{case} on {model} in {executor} costs a device more than kept in {stub_costs.TABLE.name}: {sorted(more)}; "
        f"found {costs}, kept {kept}; if that must be, renew the figures: {stub_costs.RENEW}"
    )


@pytest.mark.parametrize(
    ("case", "model", "executor"),
    [
        ("fedgmh-full", "mlp", "lanes"),
        ("fedcp", "mlp", "loop"),
        pytest.param("fedavg", "resnet18", "loop", marks=pytest.mark.slow),
    ],
)
def test_a_device_replays_steps_and_does_no_more_than_by_taking_them(case: str, model: str, executor: str) -> None:
    raw = stub_run.settings(every_algorithm()[case], model, executor, steps=12)
    recording._program.cache_clear()  # of a program that another test has recorded one step less is recorded
    with mock.patch.object(Program, "run", autospec=True, side_effect=Program.run) as runs:
        found = stub_run.run(raw, True)
    with replay.step_by_step():
        taken = stub_run.run(raw, True)
    for path, leaf in stub_run.run(raw, False).values.items():
        torch.testing.assert_close(found.values[path], leaf, rtol=0, atol=0)
    assert runs.call_count == (9 if executor == "lanes" else stub_run.CLIENTS * 9 + 2), (
        "all but those that are recorded"
    )
    mine, theirs = found.counts["update"], taken.counts["update"]
    assert mine.syncs == 0 and mine.launches <= theirs.launches and mine.uploads == theirs.uploads


def _costs(executor: str) -> stub_costs.Costs:
    return stub_costs.measure("fedavg", "mlp", executor)[1]


def _planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the logits in every loss."""
    cross_entropy = client.cross_entropy
    monkeypatch.setattr(client, "cross_entropy", lambda logits, batch: cross_entropy(change(logits), batch))


def test_a_tensor_made_without_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _planted(monkeypatch, lambda logits: logits + torch.zeros(10))
    with pytest.raises(AlgorithmError, match="same device, but found stub:0 and cpu"):
        _costs("loop")


def test_an_index_made_without_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _planted(monkeypatch, lambda logits: logits[:, torch.arange(10)])
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
def test_a_copy_or_wait_in_a_step_is_found(
    slow: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _costs("loop").step_copies == 0
    _planted(monkeypatch, slow)
    assert _costs("loop").step_copies > 0


def test_another_launch_in_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _costs("lanes")
    _planted(monkeypatch, lambda logits: logits + 1)
    after = _costs("lanes")
    assert (after.step, after.unit) == (before.step + 1, before.unit)


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with stub_device() as stub:
        there = torch.ones(2, 2, device=DEVICE)
        for refused in (there.numpy, lambda: torch.cat([there, torch.ones(2, 2)]), lambda: there @ torch.ones(2, 2)):
            with pytest.raises((RuntimeError, TypeError)):
                refused()
        assert (there + torch.tensor(1.0)).cpu().tolist() == [[2, 2], [2, 2]], "a single number may be on the host"
        assert stub.counts.row() == (2, 0, 1, 0)  # ones, add; the download

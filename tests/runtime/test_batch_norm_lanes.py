"""Batch norm in lanes: what the loop gives, whatever is in the padding of a batch."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quick_run
import stub_run
from every_algorithm import MESSAGE_KINDS, every_algorithm
from pflmpi import tree
from pflmpi.errors import ConfigError, RunError
from pflmpi.learning import sgd
from pflmpi.learning.client import Batch, model_loss
from pflmpi.models.padded_norm import MaskedBatchNorm
from pflmpi.testing import conformance
from pflmpi.testing.conformance import Runs

ROUNDING = 1e-5  # float32 sums in another order, over some steps


class SmallNet(nn.Module):
    """A convolution, batch norm, and batch norm over features."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.flat_norm = nn.Linear(16, 6), nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 4).flatten(1)
        return self.fc(self.flat_norm(self.hidden(x)).relu())


class ImageNormed(SmallNet):
    """With batch norm over images alone, which has a variance also of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 4).flatten(1)
        return self.fc(self.hidden(x).relu())


MODEL = {"name": f"{__file__}:SmallNet", "head": "fc"}
UNLIKE = {"epochs": 2, "batch_size": 10}  # clients have unlike numbers of steps, and short batches, none of one sample


def _lane(x, real, mean, var, weights):
    """The normalised samples, the loss over real ones, and its gradient."""

    def of(weights):
        with MaskedBatchNorm(real):
            z = F.batch_norm(x * weights[2], mean, var, weights[0], weights[1], training=True, momentum=0.3)
        return ((z**3).flatten(1).sum(1) * real).sum(), z

    loss, pull, z = torch.func.vjp(of, weights, has_aux=True)
    return z, loss, pull(torch.ones_like(loss))[0]


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["features", "images"])
def test_only_real_samples_are_normalised_and_remembered(shape):
    torch.manual_seed(0)
    samples, channels = [5, 3, 0], 4
    x = torch.randn(3, 5, channels, *shape)
    real = torch.stack([(torch.arange(5) < count).float() for count in samples])
    mean, var = torch.randn(3, channels), torch.rand(3, channels) + 1
    weights = [torch.rand(3, channels) + 0.5, torch.randn(3, channels), torch.rand(3) + 0.5]
    before = mean.clone(), var.clone()
    z, loss, slopes = torch.func.vmap(_lane)(x, real, mean, var, weights)
    for lane, count in enumerate(samples[:2]):
        own = [leaf[lane].clone().requires_grad_() for leaf in weights]
        kept = [leaf[lane].clone() for leaf in before]
        expected = F.batch_norm(x[lane, :count] * own[2], *kept, own[0], own[1], training=True, momentum=0.3)
        (expected**3).sum().backward()
        torch.testing.assert_close(z[lane, :count], expected)
        torch.testing.assert_close(loss[lane], (expected**3).sum())
        torch.testing.assert_close([mean[lane], var[lane]], kept)
        # 1e-4: the sums of a gradient cancel each other.
        torch.testing.assert_close([leaf[lane] for leaf in slopes], [leaf.grad for leaf in own], rtol=1e-4, atol=1e-4)
    assert torch.equal(mean[2], before[0][2]) and torch.equal(var[2], before[1][2]), "padding alone changes nothing"


def test_what_is_in_the_padding_changes_no_bit():
    torch.manual_seed(0)
    x, real = torch.randn(1, 5, 4, 2, 2), torch.tensor([[1.0, 1, 1, 0, 0]])
    weights = [torch.rand(1, 4), torch.randn(1, 4), torch.ones(1)]
    results = []
    for filled in (x, torch.where(real.view(1, 5, 1, 1, 1) > 0, x, 100.0)):
        mean, var = torch.zeros(1, 4), torch.ones(1, 4)
        z, loss, slopes = torch.func.vmap(_lane)(filled, real, mean, var, weights)
        results.append([z[:, :3], loss, *slopes, mean, var])
    assert all(map(torch.equal, *results))


def test_a_loss_that_gives_the_model_another_batch_is_refused():
    with MaskedBatchNorm(torch.ones(3)), pytest.raises(ValueError, match="4 samples in training, and the batch has 3"):
        F.batch_norm(torch.randn(4, 2), torch.zeros(2), torch.ones(2), training=True)


QUICK = (("fedgmh-full", "local"), ("fedcp", "average"))
CASES = [
    pytest.param(name, bn, marks=[] if (name, bn) in QUICK else [pytest.mark.slow])
    for name in (*MESSAGE_KINDS, "ditto", "apfl", "fedcp", "fedrod", "gpfl", "fedrep", "fedpac")
    if name != "fedfomo"  # which holds samples out, so that a batch of one is left to train on
    for bn in ("average", "local")
]


@pytest.mark.parametrize(("name", "bn"), CASES)
def test_lanes_agree_with_the_loop(name, bn, tmp_path):
    case = every_algorithm()[name]
    sections = {**case, "model": MODEL, "training": {**case["training"], **UNLIKE, "bn": bn, "lr": 0.02}}
    loop, lanes = (_after_a_round(Runs(sections, tmp_path), executor) for executor in ("loop", "lanes"))
    assert loop.keys() == lanes.keys()
    for path, array in loop.items():
        if array.dtype != bool:
            np.testing.assert_allclose(array, lanes[path], rtol=0, atol=ROUNDING, err_msg=path)


def _after_a_round(runs, executor):
    raw = runs.settings(training={"rounds": 1}, runtime={"executor": executor, "lanes": 2})
    quick_run.run(raw, runs.folder / executor)
    return conformance.state_of(runs.folder / executor, 1)


def test_lanes_have_the_same_bits_on_two_ranks_and_replayed(tmp_path):
    runs = Runs({"algorithm": {"name": "fedavg"}, "model": MODEL, "training": {**UNLIKE, "drop_last": True}}, tmp_path)
    conformance.same_bits(runs, "lanes", 2)
    conformance.replayed_steps_are_the_steps(runs)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedavg", "fedgmh-full"])
def test_resnet18_in_lanes_agrees_with_the_loop(case):
    torch.set_num_threads(1)
    loop, lanes = (
        stub_run.run(stub_run.settings(every_algorithm()[case], "resnet18", executor, 1), False).values
        for executor in ("loop", "lanes")
    )
    # After one step: batches of 6 in 18 layers of batch norm make of 1e-6 in the weights 1e-3 in one step more, also in
    # a loop.
    for path, leaf in loop.items():
        torch.testing.assert_close(lanes[path], leaf, rtol=0, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


@pytest.fixture
def odd_client(tmp_path):
    """Settings of three clients, the last of which has a last batch of one sample."""
    owner, rng = np.repeat(np.arange(3), [40, 40, 41]), np.random.default_rng(0)
    x, y = rng.integers(0, 256, (121, 1, 8, 8), np.uint8), rng.integers(0, 3, 121)
    test = np.concatenate([np.arange(count) < 8 for count in (40, 40, 41)])
    np.savez(tmp_path / "odd.npz", x=x, y=y, client=owner, test=test)
    data = {"name": "odd", "path": str(tmp_path / "odd.npz"), "limit": None}
    raw = {"data": data, "partition": {"name": "writers"}, "model": MODEL, "algorithm": {"name": "fedavg"}}
    return {**raw, "training": {"rounds": 2, "batch_size": 16, "participation": 1.0}}


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_the_start_warns_of_a_last_batch_of_one_sample(executor, odd_client, tmp_path, caplog):
    with pytest.raises(RunError, match=r"client 2\): .*more than 1 value per channel.* training\.drop_last"):
        quick_run.run(quick_run.settings(odd_client, runtime={"executor": executor}), tmp_path / "run")
    assert "model SmallNet ends the run" in caplog.text and "the last one of client 2;" in caplog.text


SCORED = {"name": "fedfomo", "received_models": 1, "held_out": 1 / 33}  # one sample is held out, and not trained on


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"drop_last": True}},
        {"training": {"steps": 2}},
        {"runtime": {"client_errors": "skip"}},
        {"algorithm": SCORED, "training": {"batch_size": 32}},
        {"model": {**MODEL, "norm": "group"}},
        {"model": {"name": f"{__file__}:ImageNormed", "head": "fc"}},
    ],
    ids=["drop_last", "steps", "skip", "held out", "group", "images"],
)
def test_nobody_is_warned_of_batches_that_train(changes, odd_client, tmp_path, caplog):
    training = {**odd_client["training"], **changes.get("training", {})}
    quick_run.run(quick_run.settings(odd_client, **{**changes, "training": training}), tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + 2
    assert "ends the run" not in caplog.text


def test_auto_leaves_batch_norm_to_the_loop(tmp_path):
    experiment = Runs({"algorithm": {"name": "fedavg"}, "model": MODEL}, tmp_path).experiment()
    assert experiment.config.runtime.executor == "loop" and np.unique(experiment.cohort).size == 1


def test_batch_norm_sees_each_micro_batch_as_a_batch(tmp_path):
    settings = {"algorithm": {"name": "fedavg"}, "model": MODEL, "training": {"batch_size": 10, "micro_batch": 6}}
    task = Runs(settings, tmp_path).experiment().tasks[0]
    x, y = torch.randn(10, *task.architecture.shape), torch.arange(10) % task.num_classes
    model, expected = task.init(), task.init()
    trained = sgd.train(task, model, [Batch(x, y)], model_loss(task), 0.1)
    with torch.no_grad():
        for part in (x[:6], x[6:]):
            task.predict(expected, part, training=True)
    for path, leaf in tree.leaves(tree.part(expected, "stats")):
        assert torch.equal(tree.at(tree.part(trained, "stats"), path), leaf), path
    lanes = {**settings, "runtime": {"executor": "lanes"}}
    with pytest.raises(ConfigError, match=r"micro_batch = 6 with a model that has batch norm, in lanes"):
        Runs(lanes, tmp_path).experiment()

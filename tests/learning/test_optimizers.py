"""Adam, AdamW, clipping, smoothing and schedules, against PyTorch's; in lanes as in the loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import small_task
from pflmpi import tree
from pflmpi.learning import sgd
from pflmpi.learning.client import Batch, cross_entropy, micro_batches, model_loss
from pflmpi.learning.local_training import LocalTraining
from pflmpi.learning.optimizers import init_optimizer_state
from pflmpi.learning.participation import Participation
from pflmpi.learning.training import TrainingConfig

OPTIONS = [
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1, "beta1": 0.5},
    {"optimizer": "adamw", "weight_decay": 0.1, "beta2": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.3},
    {"optimizer": "adam", "clip_norm": 0.2},
]


def by_torch(model, batches, lr, options):
    """The model after the steps of PyTorch's optimizer."""
    task = small_task.task()
    trained = tree.map(lambda leaf: leaf.clone().requires_grad_(True), model)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    sgd_options = {key: value for key, value in options.items() if key in ("momentum", "weight_decay")}
    if options.get("optimizer", "sgd") == "sgd":
        optimizer = torch.optim.SGD(leaves, lr, **sgd_options)
    else:
        kind = torch.optim.Adam if options["optimizer"] == "adam" else torch.optim.AdamW
        betas = (options.get("beta1", 0.9), options.get("beta2", 0.999))
        optimizer = kind(leaves, lr, betas=betas, weight_decay=options.get("weight_decay", 0.0))
    for batch in batches:
        optimizer.zero_grad()
        model_loss(task)(trained, batch).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(leaves, options["clip_norm"])
        optimizer.step()
    return tree.map(torch.Tensor.detach, trained)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_are_pytorchs(options):
    task, batches = small_task.task(**options), [small_task.batch(seed) for seed in range(5)]
    model = task.init()
    trained = sgd.train(task, model, batches, model_loss(task), 0.05)
    expected = by_torch(model, batches, 0.05, options)
    for path, leaf in tree.leaves(expected):
        # 2e-6: the same formula in float32, in another order.
        torch.testing.assert_close(tree.at(trained, path), leaf, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [*OPTIONS, {"label_smoothing": 0.2}], ids=str)
def test_lanes_step_as_the_loop_does_and_padding_changes_nothing(options):
    task, batches = small_task.task(**options), [small_task.batch(seed, 4) for seed in range(10)]
    model, smoothing = task.init(), options.get("label_smoothing", 0.0)
    nothing = torch.zeros(4)

    def in_lane(model, rate, weight):
        real = [small_task.padded(batch.x, batch.y, weight) for batch in batches]
        blank = small_task.padded(batches[0].x, batches[0].y, nothing)
        order = (blank, real[0], blank, *real[1:], blank)
        passed = [Batch(batch.x, batch.y, batch.padding, None, smoothing) for batch in order]
        return sgd.train(task.replace(batched=True), model, passed, model_loss(task), rate)

    rates, weights = torch.tensor([0.05, 0.02]), torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    lanes = torch.func.vmap(in_lane)(tree.stack([model, model]), rates, weights)
    for lane, samples in enumerate((4, 2)):
        loop_batches = [Batch(batch.x[:samples], batch.y[:samples], None, None, smoothing) for batch in batches]
        loop = sgd.train(task, model, loop_batches, model_loss(task), float(rates[lane]))
        for path, leaf in tree.leaves(loop):
            # 1e-5: float32 sums in another order; Adam divides by their roots.
            torch.testing.assert_close(tree.at(tree.row(lanes, lane), path), leaf, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"momentum": 0.9}], ids=str)
def test_kept_state_makes_two_rounds_one(options):
    task, batches = small_task.task(**options), [small_task.batch(seed) for seed in range(4)]
    at_once = sgd.train(task, task.init(), batches, model_loss(task), 0.05)
    model, states = task.init(), {"train": init_optimizer_state(task.training, task.init())}
    for part in (batches[:3], batches[3:]):
        local = LocalTraining(states, ())
        model = sgd.train(task.replace(local=local), model, part, model_loss(task), 0.05)
        states = local.states
    for path, leaf in tree.leaves(at_once):
        assert torch.equal(tree.at(model, path), leaf), path


def test_training_that_is_not_declared_or_repeated_cannot_keep_its_state():
    task = small_task.task(momentum=0.9)
    model, loss, batches = task.init(), model_loss(task), [small_task.batch(0)]
    local = LocalTraining({"train": init_optimizer_state(task.training, model)}, ())
    local_task = task.replace(local=local)
    sgd.train(local_task, model, batches, loss, 0.1)
    with pytest.raises(ValueError, match="trains 'train' twice"):
        sgd.train(local_task, model, batches, loss, 0.1)
    with pytest.raises(ValueError, match="trains 'other', which `trainings` does not declare; declared: train"):
        sgd.train(local_task, model, batches, loss, 0.1, name="other")
    again = task.replace(local=LocalTraining({"train": init_optimizer_state(task.training, model)}, ()))
    with pytest.raises(ValueError, match="other parameters"):
        sgd.train(again, model, batches, loss, 0.1, frozen=("body",))


def test_the_training_loss_is_the_mean_over_the_measured_steps():
    task, batches = small_task.task(), [small_task.batch(seed) for seed in range(3)]
    model, loss = task.init(), model_loss(task)
    seen = []
    current = model
    for batch in batches:
        seen.append(float(loss(current, batch)))
        current = sgd.train(task, current, [batch], loss, 0.1)
    for measured, expected in (((), sum(seen) / 3), (("train",), sum(seen) / 3), (("other",), float("nan"))):
        local = LocalTraining(None, measured)
        sgd.train(task.replace(local=local), model, batches, loss, 0.1)
        assert float(local.mean_loss(batches[0].x)) == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_smoothed_labels_are_pytorchs():
    logits, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 1, 0])
    expected = torch.nn.functional.cross_entropy(logits, y, label_smoothing=0.3)
    padded = small_task.padded(logits, y, torch.ones(6))
    for batch in (Batch(logits, y, None, None, 0.3), Batch(logits, y, padded.padding, None, 0.3)):
        torch.testing.assert_close(cross_entropy(logits, batch), expected)


def rates(rounds, **options):
    training = TrainingConfig(rounds=rounds, lr=0.5, **options)
    return [training.learning_rate(round) for round in range(1, rounds + 1)]


def test_schedules_are_those_of_pytorch():
    kinds = [
        ({"schedule": "constant"}, lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        ({"lr_decay": 0.9}, lambda o, n: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
        (
            {"schedule": "step", "lr_decay": 0.5, "decay_rounds": 3},
            lambda o, n: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        ),
        (
            {"schedule": "cosine", "decay_floor": 0.1},
            lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, n, eta_min=0.05),
        ),
    ]
    for options, schedule in kinds:
        for warmup in (0, 4):
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
            scheduler = schedule(optimizer, 12 - warmup)
            if warmup:
                rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
                scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, scheduler], [warmup])
            expected = []
            for _ in range(12):
                expected.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
            assert rates(12, warmup=warmup, **options) == pytest.approx(expected, rel=1e-9), (options, warmup)


def test_the_fall_of_cosine_ends_after_its_rounds_and_participations_are_counted():
    assert rates(6, schedule="cosine", decay_rounds=2, decay_floor=0.5) == pytest.approx([0.5, 0.375, *[0.25] * 4])
    training = TrainingConfig(participation=0.5)
    rounds = Participation(training, 3, np.ones(6))
    drawn = [rounds.participants(round) for round in range(1, 206)]
    for round in (1, 99, 100, 205):
        expected = [sum(client in participants for participants in drawn[:round]) for client in range(6)]
        assert rounds.counts(round).tolist() == expected


def test_participations_are_drawn_once_for_the_clients_of_a_round(monkeypatch):
    rounds, drawn = Participation(TrainingConfig(participation=0.5, batch_size=77), 3, np.ones(6)), list[int]()
    draw = Participation.participants

    def counted(self, round):
        drawn.append(round)
        return draw(self, round)

    monkeypatch.setattr(Participation, "participants", counted)
    first = rounds.counts(150)
    first += 1  # the caller's own
    assert rounds.counts(150).tolist() == (first - 1).tolist()
    assert sorted(drawn) == list(range(1, 151))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "clip_norm": 0.1}, {"optimizer": "adam"}], ids=str)
def test_micro_batches_step_as_pytorchs_accumulated_gradients(options):
    """Batches of 6 samples in parts of 4 and 2: weighted by their samples they are the mean over all 6."""
    task, batches = small_task.task(micro_batch=4, **options), [small_task.batch(seed) for seed in range(3)]
    model, plain_task = task.init(), small_task.task(**options)
    parts = [[(Batch(batch.x[at], batch.y[at]), share) for at, share in _PARTS] for batch in batches]
    result = sgd.train(task, model, batches, _with_a_penalty(task), 0.05)
    trained = tree.map(lambda leaf: leaf.clone().requires_grad_(True), model)
    leaves = [leaf for _, leaf in tree.leaves(trained)]
    adam, momentum = options.get("optimizer") == "adam", options.get("momentum", 0.0)
    optimizer = torch.optim.Adam(leaves, 0.05) if adam else torch.optim.SGD(leaves, 0.05, momentum)
    for micro in parts:
        optimizer.zero_grad()
        for part, share in micro:
            (share * _with_a_penalty(task)(trained, part)).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(leaves, options["clip_norm"])
        optimizer.step()
    at_once = sgd.train(plain_task, model, batches, _with_a_penalty(task), 0.05)
    for path, leaf in tree.leaves(trained):
        torch.testing.assert_close(tree.at(result, path), leaf.detach(), rtol=0, atol=0 if not options else 2e-6)
        torch.testing.assert_close(tree.at(result, path), tree.at(at_once, path), rtol=0, atol=1e-5)


_PARTS = ((slice(0, 4), 4 / 6), (slice(4, 6), 2 / 6))


def _with_a_penalty(task):
    """A loss with a term that is no mean over samples, and must count once."""
    return lambda params, batch: model_loss(task)(params, batch) + 0.1 * params["head"]["weight"].square().sum()


def test_a_batch_that_fits_has_the_bits_of_one_without_micro_batches():
    batches = [small_task.batch(seed) for seed in range(3)]
    task = small_task.task()
    model, loss = task.init(), model_loss(task)
    trained = sgd.train(small_task.task(micro_batch=6), model, batches, loss, 0.05)
    for path, leaf in tree.leaves(sgd.train(task, model, batches, loss, 0.05)):
        assert torch.equal(tree.at(trained, path), leaf)


def test_micro_batches_in_lanes_are_those_of_the_loop_and_padding_counts_nothing():
    task, batches = small_task.task(micro_batch=2), [small_task.batch(seed, 5) for seed in range(4)]
    model, loss = task.init(), _with_a_penalty(task)

    def in_lane(model, weight):
        local = LocalTraining(None, ())
        lane = task.replace(batched=True, local=local)
        trained = sgd.train(lane, model, [small_task.padded(batch.x, batch.y, weight) for batch in batches], loss, 0.05)
        return trained, local.mean_loss(weight)

    weights = torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    lanes, losses = torch.func.vmap(in_lane)(tree.stack([model] * 3), weights)
    for lane, samples in enumerate((5, 3)):
        local = LocalTraining(None, ())
        loop_batches = [Batch(batch.x[:samples], batch.y[:samples]) for batch in batches]
        looped = sgd.train(task.replace(local=local), model, loop_batches, loss, 0.05)
        torch.testing.assert_close(losses[lane], local.mean_loss(weights), rtol=0, atol=1e-6)
        for path, leaf in tree.leaves(looped):
            torch.testing.assert_close(tree.at(tree.row(lanes, lane), path), leaf, rtol=0, atol=1e-5)
    for path, leaf in tree.leaves(model):
        assert torch.equal(tree.at(tree.row(lanes, 2), path), leaf), "a lane of padding alone does not move"


def test_each_micro_batch_draws_noise_of_its_own():
    batch = replace(small_task.batch(0, 20), key=torch.tensor(7))
    keys = [int(part.key) for part, _ in micro_batches(batch, 1) if part.key is not None]
    assert keys[0] == 7 and len(set(keys)) == 20

"""Local training: the loop, losses, class means, steps in turns, single gradients, held-out samples, noise."""

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi import tree
from pflmpi.learning import sgd
from pflmpi.learning.client import Batch, class_means, model_loss, squared_distance, uniform
from pflmpi.learning.local_training import LocalTraining
from pflmpi.learning.participation import Participation
from pflmpi.learning.sgd import Direction, Phase, train
from pflmpi.learning.training import Pass, TrainingConfig, draw_batches, select_samples
from pflmpi.models import MODELS
from stub_device import DEVICE, stub_device

PARTS, ONE = ("body", "head"), torch.ones(1)


def test_a_turn_sees_what_the_turn_before_has_changed():
    task = small_task.task(momentum=0.5)
    model, loss, batches = task.init(), model_loss(task), [small_task.batch(0), small_task.batch(1)]
    trained = sgd.alternate(task, model, batches, [Phase(loss, ("body",), 0.2), Phase(loss, ("head",), 0.1)])

    w = small_task.to_numpy(model)
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for batch in batches:
        for names, lr in ((("W1", "b1"), 0.2), (("W2", "b2"), 0.1)):
            slopes = numpy_network.gradients(w, *small_task.flat(batch))
            for name in names:
                velocity[name] = 0.5 * velocity[name] + slopes[name]
                w[name] = w[name] - lr * velocity[name]
    small_task.assert_close(trained, w)


def test_a_plain_turn_has_neither_momentum_nor_decay_and_keeps_its_limits():
    task = small_task.task(momentum=0.9, weight_decay=0.5)
    params = {"beta": {"value": torch.tensor(0.5)}}

    def loss(params, batch):
        return -3.0 * params["beta"]["value"]

    for steps, expected in ((1, 0.53), (2, 0.56), (100, 1.0)):
        turn = Phase(loss, ("beta",), 0.01, plain=True, limits=(0.0, 1.0))
        trained = sgd.alternate(task, params, [small_task.batch(0)] * steps, [turn])
        assert float(trained["beta"]["value"]) == pytest.approx(expected, abs=1e-6)


def test_a_direction_of_two_minibatches_is_taken_by_the_configured_optimizer():
    task = small_task.task(momentum=0.5, weight_decay=0.1)
    model, pairs = (
        task.init(),
        [
            (small_task.batch(0), small_task.batch(1)),
            (small_task.batch(2), small_task.batch(3)),
        ],
    )

    def difference(params, batches):
        (first, loss), (second, _) = (sgd.gradient(task, params, model_loss(task), batch, PARTS) for batch in batches)
        return tree.map(lambda a, b: 2 * a - b, first, second), loss

    trained = sgd.train(task, model, pairs, Direction(difference), 0.2)
    w = small_task.to_numpy(model)
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for pair in pairs:
        first, second = (numpy_network.gradients(w, *small_task.flat(batch)) for batch in pair)
        for name in w:
            velocity[name] = 0.5 * velocity[name] + 2 * first[name] - second[name] + 0.1 * w[name]
        w = {name: w[name] - 0.2 * velocity[name] for name in w}
    small_task.assert_close(trained, w)


def ones(params, batch):
    return tree.map(lambda leaf: torch.ones(leaf.shape), {name: params[name] for name in PARTS}), torch.tensor(5.0)


def in_two_lanes(direction):
    """The models and mean losses of two lanes, of which the second has one minibatch, then padding alone."""
    task = small_task.task(momentum=0.5, weight_decay=0.1).replace(batched=True)
    x, y = (torch.stack([getattr(small_task.batch(0), name)] * 2) for name in "xy")
    weight = torch.ones(2, 3, len(y[0]))
    weight[1, 1:] = 0

    def in_lane(model, x, y, weight):
        local = LocalTraining(None, ())
        padded = [small_task.padded(x, y, step_weight) for step_weight in weight.unbind(0)]
        model = sgd.train(task.replace(local=local), model, padded, Direction(direction), 0.2)
        return model, local.mean_loss(x)

    return torch.func.vmap(in_lane)(tree.stack([task.init()] * 2), x, y, weight)


def test_a_direction_does_not_move_a_lane_whose_minibatch_is_padding_alone():
    models, losses = in_two_lanes(ones)
    task = small_task.task(momentum=0.5, weight_decay=0.1)
    once = sgd.train(task, task.init(), [small_task.batch(0)], Direction(ones), 0.2)
    for path, leaf in tree.leaves(once):
        torch.testing.assert_close(tree.at(models, path)[1], leaf, rtol=0, atol=1e-6)
        assert (tree.at(models, path)[0] - leaf).abs().min() > 0.1
    assert losses.tolist() == [5.0, 5.0]


def test_a_direction_that_reads_a_tensor_from_elsewhere_is_refused_by_name_in_lanes():
    pull = torch.ones(())

    def direction(params, batch):
        slopes, loss = ones(params, batch)
        return tree.map(lambda leaf: pull * leaf, slopes), loss

    with pytest.raises(ValueError, match=r"'pull' of shape \(\) that is in neither its parameters nor its batch"):
        in_two_lanes(direction)


def test_training_what_is_the_same_in_all_lanes_is_refused():
    task = small_task.task()

    def in_lane(index):
        return sgd.train(task.replace(batched=True), task.init(), [small_task.batch(0)], model_loss(task), 0.2)

    with pytest.raises(ValueError, match=r"the same for all clients of a group, .*; train what depends on the client"):
        torch.func.vmap(in_lane)(torch.arange(2))


def test_a_loss_that_gets_a_tuple_of_minibatches_is_refused():
    task, pair = small_task.task(), (small_task.batch(0), small_task.batch(1))
    with pytest.raises(ValueError, match="a loss takes one minibatch, and a step was given 2; give a Direction"):
        sgd.train(task, task.init(), [pair], model_loss(task), 0.2)


@pytest.mark.parametrize("change", [lambda slopes: slopes.pop("head"), lambda slopes: slopes["head"].update(bias=ONE)])
def test_a_direction_of_another_shape_is_refused(change):
    task = small_task.task()

    def direction(params, batch):
        slopes, loss = ones(params, batch)
        change(slopes)
        return slopes, loss

    with pytest.raises(ValueError, match="the direction is another tree than what is trained: head/bias: "):
        sgd.train(task, task.init(), [small_task.batch(0)], Direction(direction), 0.2)


@pytest.mark.parametrize("name", ["resnet18", "cnn"])
def test_resnet18_trains_with_channels_last_and_returns_contiguous_weights(name, monkeypatch):
    architecture = MODELS[name]().bind((3, 32, 32), 3)
    task = small_task.task().replace(architecture=architecture)
    minibatch = Batch(torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3)
    plain, seen, model = model_loss(task), [], task.init()

    def loss(params, batch):
        kernels = [
            leaf for _, leaf in tree.leaves(params) if leaf.dim() == 4 and leaf.shape[2] > 1 and leaf.shape[1] > 1
        ]
        seen.append({leaf.is_contiguous(memory_format=torch.channels_last) for leaf in kernels})
        return plain(params, batch)

    trained = sgd.train(task, model, [minibatch], loss, 0.02)
    assert seen == [{name == "resnet18"}]
    assert all(leaf.is_contiguous() for weights in (model, trained) for _, leaf in tree.leaves(weights))
    monkeypatch.setattr(type(architecture), "trains_channels_last", False)
    expected = dict(tree.leaves(sgd.train(task, model, [minibatch], plain, 0.02)))
    for path, leaf in tree.leaves(trained):
        torch.testing.assert_close(leaf, expected[path], rtol=0, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(("precision", "expected"), [("fp32", False), ("tf32", True)])
def test_a_gpu_trains_with_channels_last_in_the_precisions_that_gain_by_it(precision, expected):
    architecture = MODELS["resnet18"]().bind((3, 32, 32), 3)
    task = small_task.task(precision=precision).replace(architecture=architecture, device=DEVICE)
    seen = []

    def loss(params, batch):
        seen.append(tree.at(params, "body/layer1/0/conv1/weight").is_contiguous(memory_format=torch.channels_last))
        return model_loss(task)(params, batch)

    with stub_device():
        minibatch = Batch(torch.rand(6, 3, 32, 32).to(DEVICE), (torch.arange(6) % 3).to(DEVICE))
        model = tree.map(lambda leaf: leaf.to(DEVICE), task.init())
        trained = sgd.train(task, model, [minibatch], loss, 0.02)
        assert all(leaf.is_contiguous() for _, leaf in tree.leaves(trained))
    assert seen == [expected]


def test_gradient_is_that_of_the_parts_asked_for_and_changes_nothing():
    task = small_task.task()
    model, batch = task.init(), small_task.batch(2)
    before = tree.clone(model)
    gradient, value = sgd.gradient(task, model, model_loss(task), batch, ("head",))
    assert value == model_loss(task)(model, batch) and not value.requires_grad
    expected = numpy_network.gradients(small_task.to_numpy(model), *small_task.flat(batch))
    assert list(gradient) == ["head"]
    np.testing.assert_allclose(gradient["head"]["weight"], expected["W2"], atol=1e-6)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(model), tree.leaves(before), strict=True))
    moved = sgd.step(model, gradient, 0.1)
    assert moved["body"] is model["body"]
    after = small_task.to_numpy(model)["W2"] - 0.1 * expected["W2"]
    np.testing.assert_allclose(moved["head"]["weight"], after, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_gradient_and_train_are_refused_in_a_loss_that_would_be_differentiated_through_them(batched):
    task, batch = small_task.task().replace(batched=batched), small_task.batch(0, size=1)
    batch = small_task.padded(batch.x, batch.y, torch.ones(1)) if batched else batch

    def square(params, batch):
        return params["part"]["weight"] ** 2

    def trained(inner):
        def loss(params, batch):  # ((1 - 0.5) w)^2 where the gradient is no constant
            return square(sgd.step(params, inner(params, batch), 0.25), batch)

        def train_one(weight):
            return train(task, {"part": {"weight": weight}}, [batch] * 2, loss, 1.0)["part"]["weight"]

        return torch.func.vmap(train_one)(torch.ones(2))[1] if batched else train_one(torch.ones(()))

    def of_constants(params, batch):
        return sgd.gradient(task, tree.map(torch.Tensor.detach, params), square, batch, ("part",))[0]

    for function, inner in (
        ("`gradient`", lambda params, batch: sgd.gradient(task, params, square, batch, ("part",))[0]),
        ("`train` or `alternate`", lambda params, batch: train(task, params, [batch], square, 0.25)),
    ):
        with pytest.raises(ValueError, match=rf"{function} was given 'part/weight', .* use torch.func.grad"):
            trained(inner)
    assert trained(of_constants) == 0
    assert trained(lambda params, batch: torch.func.grad(lambda params: square(params, batch))(params)) == 0.25


def test_held_out_samples_are_the_same_in_every_pass_and_apart_from_the_rest():
    samples = np.arange(100, 137)
    sides = [
        select_samples(samples, Pass(held_out=0.2, side=side), np.random.default_rng(5))
        for side in ("rest", "held_out")
    ]
    assert len(sides[1]) == 7 and sorted(np.concatenate(sides)) == samples.tolist()
    assert select_samples(samples, Pass(), np.random.default_rng(5)) is samples
    two = [
        select_samples(samples[:2], Pass(held_out=0.01, side=side), np.random.default_rng(0))
        for side in ("rest", "held_out")
    ]
    assert sorted(np.concatenate(two)) == [100, 101]
    assert select_samples(samples[:1], Pass(held_out=0.5, side="held_out"), np.random.default_rng(0)).tolist() == [100]


def test_the_length_of_a_pass_is_its_steps_or_its_epochs_or_the_configured_one():
    training = TrainingConfig(batch_size=4, epochs=2)

    def length(training_pass):
        return len(draw_batches(np.random.default_rng(0), 10, training, training_pass))

    assert [length(Pass()), length(Pass(epochs=1)), length(Pass(steps=7)), length(Pass(epochs=0))] == [6, 3, 7, 0]


def test_noise_is_uniform_and_does_not_depend_on_padding():
    key = torch.tensor(-1234567890123456789)
    noise = uniform(key, (1000, 50))
    assert torch.equal(uniform(key, (1200, 50))[:1000], noise)
    assert noise.min() > 0 and noise.max() < 1
    # Standard errors for 50,000 independent numbers: 0.0013 of the mean, 0.0045 of a correlation.
    assert abs(float(noise.mean()) - 0.5) < 0.006 and abs(float(noise.var()) - 1 / 12) < 0.002
    values = noise.flatten()
    assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.02
    assert not torch.equal(uniform(key + 1, (1000, 50)), noise)


def test_noise_is_that_of_splitmix64():
    """Against Python's whole numbers, which have no width."""
    mask = (1 << 64) - 1
    for key in (0, 7, -5):
        noise = uniform(torch.tensor(key), (3,)).tolist()
        for place in (1, 2, 3):
            z = (key + place * 0x9E3779B97F4A7C15) & mask
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
            assert noise[place - 1] == ((z >> 41) + 0.5) / 2**23


@pytest.mark.parametrize("kind", [{}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}])
def test_lanes_step_as_pytorch_does(kind):
    weights = torch.arange(6.0).view(3, 2)  # of three lanes
    task = small_task.task(**kind)
    padded = small_task.padded(torch.zeros(1, *small_task.SHAPE), torch.zeros(1, dtype=torch.int64), torch.ones(1))

    def trained(weight):
        def loss(params, batch):
            return (params["part"]["weight"] * torch.tensor([1.0, 2.0])).sum()

        params = {"part": {"weight": weight}}
        return tree.at(sgd.train(task.replace(batched=True), params, [padded] * 3, loss, 0.1), "part/weight")

    expected = weights.clone().requires_grad_(True)
    optimizer = torch.optim.SGD([expected], 0.1, **kind)
    for _ in range(3):
        optimizer.zero_grad()
        (expected * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(torch.func.vmap(trained)(weights), expected.detach(), rtol=0, atol=1e-6)


def test_clients_begin_with_the_same_model_but_none_with_that_of_another():
    task, drawn = small_task.task(), []
    for client in (3, -1, 5):
        model = task.of_client(client).init()
        drawn.append(small_task.to_numpy(tree.clone(model)))
        tree.map(torch.Tensor.zero_, model)
    for weights in drawn[1:]:
        assert all(np.array_equal(weights[name], drawn[0][name]) and drawn[0][name].any() for name in ("W1", "W2"))
    other_seed = small_task.to_numpy(task.replace(seed=task.seed + 1).init())
    assert not np.array_equal(other_seed["W1"], drawn[0]["W1"])


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.1), (0.9, 0.01)])
def test_train_is_sgd_as_pytorch_defines_it(momentum, decay):
    task = small_task.task(momentum=momentum, weight_decay=decay)
    model = task.init()
    before = tree.clone(model)
    batches = [small_task.batch(seed) for seed in range(4)]
    trained = train(task, model, batches, model_loss(task), 0.2)

    w = small_task.to_numpy(model)
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    for batch in batches:
        for name, gradient in numpy_network.gradients(w, *small_task.flat(batch)).items():
            velocity[name] = momentum * velocity[name] + gradient + decay * w[name]
            w[name] = w[name] - 0.2 * velocity[name]
    small_task.assert_close(trained, w)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.leaves(model), tree.leaves(before), strict=True))


def test_frozen_parts_do_not_move():
    task = small_task.task()
    model = task.init()
    trained = train(task, model, [small_task.batch(0)], model_loss(task), 0.2, frozen=("head",))
    assert torch.equal(trained["head"]["weight"], model["head"]["weight"])
    assert not torch.equal(small_task.body_leaves(trained)[0], small_task.body_leaves(model)[0])


def test_padding_changes_nothing():
    task = small_task.task()
    batch = small_task.batch(1, 4)
    padded = small_task.padded(
        torch.cat([batch.x, torch.full((3, *small_task.SHAPE), 9.0)]),
        torch.cat([batch.y, torch.zeros(3, dtype=torch.int64)]),
        torch.tensor([1.0, 1, 1, 1, 0, 0, 0]),
    )
    plain = train(task, task.init(), [batch], model_loss(task), 0.2)
    masked = train(task, task.init(), [padded], model_loss(task), 0.2)
    small_task.assert_close(masked, small_task.to_numpy(plain), 1e-7)


def test_a_step_of_padding_alone_changes_nothing_in_a_lane():
    task = small_task.task(momentum=0.5, weight_decay=0.1).replace(batched=True)
    batch = small_task.batch(1, 4)
    x, y = batch.x.expand(2, *batch.x.shape), batch.y.expand(2, -1)
    weight = torch.tensor([[1.0] * 4, [0.0] * 4])
    models = tree.stack([task.init(), task.init()])

    def one_lane(model, x, y, weight):
        return train(task, model, [small_task.padded(x, y, weight)] * 2, model_loss(task), 0.2)

    trained = torch.func.vmap(one_lane)(models, x, y, weight)
    first = dict(tree.leaves(models))
    for path, leaf in tree.leaves(trained):
        assert torch.equal(leaf[1], first[path][1]), path
        assert not torch.equal(leaf[0], first[path][0]), path


def test_class_means_are_the_means_of_each_class():
    task = small_task.task()
    model = task.init()
    batches = [small_task.batch(3, 7), small_task.batch(4, 2)]
    means = class_means(task, model, small_task.data(batches))
    x, y = (np.concatenate(parts) for parts in zip(*(small_task.flat(batch) for batch in batches), strict=True))
    z, _ = numpy_network.forward(small_task.to_numpy(model), x)
    for label in range(small_task.CLASSES):
        expected = z[y == label].mean(0) if (y == label).any() else np.zeros(small_task.FEATURES)
        np.testing.assert_allclose(means["means"][label], expected, atol=1e-6)
    assert means["counts"].tolist() == np.bincount(y, minlength=small_task.CLASSES).tolist()


def test_squared_distance_by_hand():
    a = {"body": {"w": torch.tensor([1.0, 2.0])}, "head": {"b": torch.tensor([5.0])}}
    b = {"body": {"w": torch.tensor([0.0, 4.0])}}
    assert squared_distance(a, b).item() == 5.0


def test_the_squared_distance_has_the_bits_of_autograds_own_formula():
    rng = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=rng, requires_grad=True) for shape in ((33, 7), (101,))]
    others = [torch.randn(leaf.shape, generator=rng) for leaf in params]
    a, b = ({"x": x, "part": {"y": y}} for x, y in (params, others))
    formula = torch.stack([(x - y).square().sum() for x, y in zip(params, others, strict=True)]).sum()
    plain = (params[0] ** 3).sum()
    expected = torch.autograd.grad(plain + 0.37 * formula, params, retain_graph=True)
    distance = squared_distance(a, b)
    assert torch.equal(distance, formula)
    assert all(map(torch.equal, torch.autograd.grad(plain + 0.37 * distance, params), expected))


def test_the_squared_distance_is_differentiable_by_both_and_twice_in_and_outside_lanes():
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, *shape, generator=rng, dtype=torch.float64) for shape in ((3, 2), (4,), (3, 2), (4,))]

    def distance(*tensors):
        w, v, x, y = tensors
        return squared_distance({"w": w, "v": {"v": v}}, {"w": x, "v": {"v": y}}) ** 2

    def formula(*tensors):
        w, v, x, y = tensors
        return ((w - x).square().sum() + (v - y).square().sum()) ** 2

    of_all = tuple(range(len(tensors)))
    ours, plain = (torch.func.jacrev(torch.func.jacrev(value, of_all), of_all) for value in (distance, formula))
    torch.testing.assert_close(torch.vmap(ours)(*tensors), torch.vmap(plain)(*tensors))
    for lane in zip(*tensors, strict=True):
        leaves = [leaf.clone().requires_grad_(True) for leaf in lane]
        assert torch.autograd.gradcheck(distance, leaves) and torch.autograd.gradgradcheck(distance, leaves)


def test_batches_of_an_epoch_hold_every_sample_once():
    training = TrainingConfig(batch_size=4, epochs=2)
    order = draw_batches(np.random.default_rng(0), 10, training)
    assert [len(batch) for batch in order] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(order[:3])) == list(range(10))
    assert list(np.concatenate(order[:3])) != list(np.concatenate(order[3:]))


def test_drop_last_leaves_the_short_batch_out():
    dropping = TrainingConfig(batch_size=4, epochs=2, drop_last=True)
    assert [len(batch) for batch in draw_batches(np.random.default_rng(0), 10, dropping)] == [4, 4, 4, 4]
    assert draw_batches(np.random.default_rng(0), 3, dropping) == []


def test_steps_replace_epochs():
    order = draw_batches(np.random.default_rng(0), 10, TrainingConfig(batch_size=4, steps=7))
    assert len(order) == 7 == TrainingConfig(batch_size=4, steps=7).num_steps(10)


def test_participants_are_distinct_and_as_many_as_said():
    rounds = Participation(TrainingConfig(participation=0.25), 0, np.ones(10))
    chosen = [rounds.participants(round) for round in range(1, 200)]
    assert all(
        len(participants) == 3 and len(set(participants)) == 3 and list(participants) == sorted(participants)
        for participants in chosen
    )
    assert set(np.concatenate(chosen)) == set(range(10))
    assert len(Participation(TrainingConfig(participation=0.001), 0, np.ones(10)).participants(1)) == 1

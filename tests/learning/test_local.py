"""The training loop, the losses and class means, against NumPy."""

import numpy as np
import pytest
import torch

import numpy_network
import small_task
from pflmpi import tree
from pflmpi.learning.batch_order import batch_order
from pflmpi.learning.client import class_means, model_loss, squared_distance
from pflmpi.learning.sgd import train
from pflmpi.learning.training import TrainingConfig


def test_clients_begin_with_the_same_model_but_none_with_that_of_another():
    task, drawn = small_task.task(), []
    for client in (3, -1, 5):
        model = task.of_client(client).init()
        drawn.append(small_task.to_numpy(tree.clone(model)))
        tree.map(torch.Tensor.zero_, model)
    for other in drawn[1:]:
        assert all(np.array_equal(other[name], drawn[0][name]) and drawn[0][name].any() for name in ("W1", "W2"))
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
    for one in batches:
        for name, gradient in numpy_network.gradients(w, *small_task.flat(one)).items():
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
    one = small_task.batch(1, 4)
    padded = small_task.padded(
        torch.cat([one.x, torch.full((3, *small_task.SHAPE), 9.0)]),
        torch.cat([one.y, torch.zeros(3, dtype=torch.int64)]),
        torch.tensor([1.0, 1, 1, 1, 0, 0, 0]),
    )
    plain = train(task, task.init(), [one], model_loss(task), 0.2)
    masked = train(task, task.init(), [padded], model_loss(task), 0.2)
    small_task.assert_close(masked, small_task.to_numpy(plain), 1e-7)


def test_a_step_of_padding_alone_changes_nothing_in_a_lane():
    task = small_task.task(momentum=0.5, weight_decay=0.1).replace(batched=True)
    one = small_task.batch(1, 4)
    x, y = one.x.expand(2, *one.x.shape), one.y.expand(2, -1)
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
    found = class_means(task, model, small_task.data(batches))
    x, y = (np.concatenate(parts) for parts in zip(*(small_task.flat(one) for one in batches), strict=True))
    z, _ = numpy_network.forward(small_task.to_numpy(model), x)
    for label in range(small_task.CLASSES):
        expected = z[y == label].mean(0) if (y == label).any() else np.zeros(small_task.FEATURES)
        np.testing.assert_allclose(found["means"][label], expected, atol=1e-6)
    assert found["counts"].tolist() == np.bincount(y, minlength=small_task.CLASSES).tolist()


def test_squared_distance_by_hand():
    a = {"body": {"w": torch.tensor([1.0, 2.0])}, "head": {"b": torch.tensor([5.0])}}
    b = {"body": {"w": torch.tensor([0.0, 4.0])}}
    assert squared_distance(a, b).item() == 5.0


def test_the_squared_distance_has_the_bits_of_autograds_own_formula():
    rng = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=rng, requires_grad=True) for shape in ((33, 7), (101,))]
    others = [torch.randn(leaf.shape, generator=rng) for leaf in mine]
    a, b = ({"x": x, "part": {"y": y}} for x, y in (mine, others))
    formula = torch.stack([(x - y).square().sum() for x, y in zip(mine, others, strict=True)]).sum()
    plain = (mine[0] ** 3).sum()
    expected = torch.autograd.grad(plain + 0.37 * formula, mine, retain_graph=True)
    found = squared_distance(a, b)
    assert torch.equal(found, formula)
    assert all(map(torch.equal, torch.autograd.grad(plain + 0.37 * found, mine), expected))


def test_batches_of_an_epoch_hold_every_sample_once():
    training = TrainingConfig(batch_size=4, epochs=2)
    order = batch_order(np.random.default_rng(0), 10, training)
    assert [len(one) for one in order] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(order[:3])) == list(range(10))
    assert list(np.concatenate(order[:3])) != list(np.concatenate(order[3:]))


def test_drop_last_leaves_the_short_batch_out():
    dropping = TrainingConfig(batch_size=4, epochs=2, drop_last=True)
    assert [len(one) for one in batch_order(np.random.default_rng(0), 10, dropping)] == [4, 4, 4, 4]
    assert batch_order(np.random.default_rng(0), 3, dropping) == []


def test_steps_replace_epochs():
    order = batch_order(np.random.default_rng(0), 10, TrainingConfig(batch_size=4, steps=7))
    assert len(order) == 7 == TrainingConfig(batch_size=4, steps=7).num_steps(10)


def test_participants_are_distinct_and_as_many_as_said():
    training = TrainingConfig(participation=0.25)
    chosen = [training.participants(0, round, 10) for round in range(1, 200)]
    assert all(len(one) == 3 and len(set(one)) == 3 and list(one) == sorted(one) for one in chosen)
    assert set(np.concatenate(chosen)) == set(range(10))
    assert len(TrainingConfig(participation=0.001).participants(0, 1, 10)) == 1

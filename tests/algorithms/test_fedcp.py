"""FedCP: a gate with noise while it trains and none when it is tested, two heads, features near the global body's."""

import dataclasses

import numpy as np
import pytest
import torch

import comparisons
import numeric_gradients
import numpy_network
import small_task
from pflmpi import tree
from pflmpi.algorithms.conditional import gate, init_gate
from pflmpi.algorithms.fedcp import FedCP, context, discrepancy
from pflmpi.learning.client import Batch, uniform
from pflmpi.messages.kinds import Mean
from pflmpi.models import MODELS

LR, D = 0.1, small_task.FEATURES


def client_and_down(seed):
    """State and message with random entries everywhere."""
    task = small_task.task()
    client, server = FedCP().init_client(task), FedCP().init_server(task)
    return numeric_gradients.varied(client, seed), {
        "model": numeric_gradients.varied(tree.part(server, "model"), seed + 1)
    }


def keyed(seed, size=6):
    return dataclasses.replace(small_task.batch(seed, size), key=torch.tensor(1000 + seed))


def gate_of(w, z, noise):
    """The softmax over the two scores of each feature plus noise [2, B, d]; the first of both."""
    layer = numeric_gradients.layer_norm(w, "gate/norm", numeric_gradients.logits(w, "gate/linear", z))
    scores = np.stack(np.split(np.maximum(layer, 0), 2, axis=1)) + noise
    return numpy_network.softmax(scores.transpose(1, 2, 0))[..., 0]


def unit(row):
    return row / np.linalg.norm(row)


def discrepancy_of(a, b):
    """Pair by pair."""

    def kernel(x, y):
        return sum(np.exp(-0.5 * ((x - y) ** 2).sum() / bandwidth) for bandwidth in (10, 15, 20, 50))

    pairs = [(i, j) for i in range(len(a)) for j in range(len(b))]
    return float(np.mean([kernel(a[i], a[j]) + kernel(b[i], b[j]) - 2 * kernel(a[i], b[j]) for i, j in pairs]))


def test_without_noise_the_gate_is_a_softmax_over_two_scores():
    weights = numeric_gradients.varied(init_gate(np.random.default_rng(0), D), 3)
    z = small_task.batch(1).x.flatten(1)[:, [0, 1, 2, 3, 0]]
    expected = gate_of(numeric_gradients.weights({"gate": weights}), z.double().numpy(), np.zeros((2, 6, D)))
    np.testing.assert_allclose(gate(weights, z), expected, rtol=0, atol=1e-6)


def test_noise_makes_the_gate_a_gumbel_softmax():
    """0.015 is some three standard deviations of the difference of two medians of 20000 draws."""
    weights = numeric_gradients.varied(init_gate(np.random.default_rng(0), 2), 3)
    w, z, draws = numeric_gradients.weights({"gate": weights}), torch.tensor([[0.3, -1.0]]), 20000
    shares = gate(weights, z.expand(draws, -1), uniform(torch.tensor(5), (draws, 2)))
    gumbel = -np.log(-np.log(np.random.default_rng(1).random((2, draws, 2))))
    expected = gate_of(w, z.double().numpy(), gumbel)
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        np.testing.assert_allclose(
            np.quantile(shares.numpy(), level, axis=0), np.quantile(expected, level, axis=0), rtol=0, atol=0.015
        )


def test_the_discrepancy_of_large_features_is_at_most_that_of_any():
    """Four kernels of at most 1, twice; rounding leaves distances of some -100 where they are 0."""
    a, b = 1e4 * torch.rand(2, 6, 50, generator=torch.Generator().manual_seed(0))
    assert abs(discrepancy(a, b, small_task.batch(0))) <= 8


def test_the_discrepancy_is_the_mean_over_pairs_of_four_kernels():
    a, b = (numeric_gradients.varied({"z": torch.zeros(6, D)}, seed)["z"] * 8 for seed in (1, 2))
    expected = discrepancy_of(a.double().numpy(), b.double().numpy())
    assert expected > 0.1
    np.testing.assert_allclose(discrepancy(a, b, small_task.batch(0)), expected, rtol=1e-5)
    assert discrepancy(a, a, small_task.batch(0)).abs() < 1e-6


def test_the_discrepancy_is_over_pairs_of_real_samples():
    a, b = (numeric_gradients.varied({"z": torch.zeros(6, D)}, seed)["z"] * 8 for seed in (1, 2))
    real = torch.tensor([1.0, 1, 1, 1, 0, 0])
    batch = small_task.padded(small_task.batch(0).x, small_task.batch(0).y, real)
    expected = discrepancy_of(a[:4].double().numpy(), b[:4].double().numpy())
    np.testing.assert_allclose(discrepancy(a, b, batch), expected, rtol=1e-5)


def test_body_head_and_gate_step_at_once_on_the_whole_loss():
    task, batches, (client, down) = small_task.task(), [keyed(0), keyed(1, 3)], client_and_down(1)
    state, up = FedCP(alignment_weight=0.7).client_update(task, client, down, small_task.data(batches, LR))
    start = numeric_gradients.weights({**down["model"], "own": client["head"]})
    w, paths = dict(start), [path for path in start if not path.startswith("head")]
    view = unit(start["own/weight"].sum(0))  # of the head as the round begins
    for batch in batches:
        x, y = small_task.flat(batch)
        u = uniform(batch.key, (len(y), D)).double().numpy()
        noise = np.stack([np.log(u), np.log(1 - u)])  # their difference is that of two Gumbel variables

        def loss(w, x=x, y=y, noise=noise):
            z = numeric_gradients.features(w, x)
            share = gate_of(w, z * view, noise)
            scores = numeric_gradients.logits(w, "own", share * z) + numeric_gradients.logits(
                start, "head", (1 - share) * z
            )
            return numeric_gradients.cross_entropy(scores, y) + 0.7 * discrepancy_of(
                z, numeric_gradients.features(start, x)
            )

        w = numeric_gradients.descend(loss, w, paths, LR)
    numeric_gradients.assert_near(state["head"], w, "own/")
    sent = {**w, **{f"head/{name}": (w[f"own/{name}"] + start[f"head/{name}"]) / 2 for name in ("weight", "bias")}}
    numeric_gradients.assert_near(up["model"], sent)
    assert sorted(state) == ["head"] and sorted(up["model"]) == ["body", "gate", "head"]


def test_the_context_is_that_of_the_personal_head_from_the_first_round_on():
    """The authors begin with random numbers."""
    client = FedCP().init_client(small_task.task())
    rows = client["head"]["weight"].double().numpy()
    np.testing.assert_allclose(context(client["head"]), unit(rows.sum(0)), rtol=0, atol=1e-6)


def test_a_model_is_tested_without_noise():
    """A defect of public code: the Gumbel noise stays on, so that the accuracy is random."""
    (client, down), x = client_and_down(1), small_task.batch(9).x
    w = numeric_gradients.weights({**down["model"], "own": client["head"]})
    z = numeric_gradients.features(w, x.flatten(1).double().numpy())
    share = gate_of(w, z * unit(w["own/weight"].sum(0)), np.zeros((2, 6, D)))
    expected = numeric_gradients.logits(w, "own", share * z) + numeric_gradients.logits(w, "head", (1 - share) * z)
    scores = FedCP().predict(small_task.task(), client, down, x)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert torch.equal(scores, FedCP().predict(small_task.task(), client, down, x))


def test_everyone_starts_from_the_same_gate_and_means_are_by_samples():
    task = small_task.task()
    server = FedCP().init_server(task)
    assert comparisons.same(server, FedCP().init_server(task))
    assert tree.at(server, "model/gate/linear/weight").shape == (2 * D, D)
    kind = FedCP().uplink(task)["model"]
    assert isinstance(kind, Mean) and kind.by == "samples" and tree.differences(kind.like, server["model"]) == []


@pytest.mark.parametrize("bn", ["average", "local"])
def test_under_batch_norm_features_agree_at_first(bn):
    task = comparisons.with_batch_norm(bn=bn)
    client = FedCP().init_client(task)
    down = FedCP().publish(task, FedCP().init_server(task), np.arange(4))
    before = tree.clone({**down, "client": client})
    data = small_task.data([keyed(0)], LR)
    results = [FedCP(alignment_weight=weight).client_update(task, client, down, data) for weight in (0.0, 5.0)]
    (_, up), (_, aligned) = results
    assert comparisons.same({**down, "client": client}, before), "the fixed body changed what was received"
    for path, leaf in tree.leaves(up["model"]):
        # Both bodies see the batch alike, so that the discrepancy and its gradient are zero but for rounding.
        torch.testing.assert_close(tree.at(aligned["model"], path), leaf, rtol=0, atol=1e-5)


def test_under_dropout_too_features_agree_at_first():
    model = MODELS["dropout_cnn"]().bind((1, 28, 28), 10)
    task = small_task.task().replace(architecture=model)
    client, down = FedCP().init_client(task), FedCP().publish(task, FedCP().init_server(task), np.arange(4))
    batch = Batch(torch.rand(3, 1, 28, 28), torch.arange(3), key=torch.tensor(7))
    data = comparisons.data_of({"train": [batch]})
    ups = [FedCP(alignment_weight=weight).client_update(task, client, down, data)[1] for weight in (0.0, 5.0)]
    for path, leaf in tree.leaves(ups[0]["model"]):  # 1e-5: rounding, as above
        torch.testing.assert_close(tree.at(ups[1]["model"], path), leaf, rtol=0, atol=1e-5)


def test_padding_alone_and_padded_rows_change_nothing():
    task, (client, down) = small_task.task(momentum=0.5, weight_decay=0.1).replace(batched=True), client_and_down(1)
    batch = keyed(0)

    def update(client, down, weight):
        batches = [
            dataclasses.replace(small_task.padded(batch.x, batch.y, step_weight), key=batch.key)
            for step_weight in weight.unbind(0)
        ]
        return FedCP().client_update(task, client, down, comparisons.data_of({"train": batches}))

    lane = tree.stack([{"client": client, "down": down}])
    real = torch.tensor([1.0, 1, 1, 1, 0, 0])
    once, twice = (
        torch.func.vmap(update)(lane["client"], lane["down"], weight.unsqueeze(0))
        for weight in (real.unsqueeze(0), torch.stack([real, torch.zeros(6)]))
    )
    assert comparisons.same(once[0], twice[0]) and comparisons.same(once[1], twice[1])
    alone = Batch(batch.x[:4], batch.y[:4], None, batch.key)
    expected = FedCP().client_update(task.replace(batched=False), client, down, comparisons.data_of({"train": [alone]}))
    for stacked, wanted in zip(once, expected, strict=True):
        for path, leaf in tree.leaves(wanted):
            torch.testing.assert_close(tree.at(tree.row(stacked, 0), path), leaf, rtol=0, atol=1e-6)

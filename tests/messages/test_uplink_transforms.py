"""Transforms of what a client sends: their arithmetic, on numbers that can be checked by hand, and their bytes."""

import numpy as np
import pytest
import torch

from pflmpi import tree
from pflmpi.messages.declared import Declared
from pflmpi.messages.kinds import ClassMeans, Mean, Rows, Shared, tensor
from pflmpi.messages.uplink_transforms import UplinkConfig, transform

ONE = np.array([4])


def sent(values, residual=None, received=None, round=1, clients=ONE, seed=0, **keys):
    """What is sent of the vectors of one client, or of each of several, and what is left."""
    rows = {path: torch.tensor(value) for path, value in values.items()}
    rows = {path: leaf if len(clients) > 1 else leaf.unsqueeze(0) for path, leaf in rows.items()}
    before = {path: torch.zeros_like(leaf) if received is None else received[path] for path, leaf in rows.items()}
    up = {"model": Mean(tree.map(lambda leaf: leaf[0], rows))}
    config = UplinkConfig(**keys)
    if residual is not None:
        residual = torch.tensor(residual).reshape(len(clients), -1)
    messages, left = transform(config, up, seed, round, clients, {"model": rows}, {"model": before}, residual)
    return messages["model"], left


def test_the_norm_over_all_tensors_is_clipped_and_a_shorter_change_stays():
    long, _ = sent({"a": [3.0, 0.0], "b": [4.0]}, clip=1.0)
    assert long["a"].tolist() == [[pytest.approx(0.6), 0.0]] and long["b"].tolist() == [[pytest.approx(0.8)]]
    short, _ = sent({"a": [0.25], "b": [0.5]}, clip=1.0)
    assert short["a"].item() == 0.25 and short["b"].item() == 0.5
    assert sent({"a": [0.0]}, clip=1.0)[0]["a"].item() == 0


def test_what_is_clipped_is_the_change_against_what_was_received():
    model, _ = sent({"a": [10.0, 5.0]}, received={"a": torch.tensor([[10.0, 1.0]])}, clip=1.0)
    assert model["a"].tolist() == [[10.0, 2.0]]


def test_a_mean_of_changes_is_clipped_as_it_is_beside_a_model():
    like, ones = {"a": tensor(1)}, {"a": torch.ones(1, 1)}
    up = {"change": Mean(like, is_change=True), "model": Mean(like)}
    messages = {"change": {"a": torch.tensor([[6.0]])}, "model": {"a": torch.tensor([[9.0]])}}
    sent, _ = transform(UplinkConfig(clip=5.0), up, 0, 1, ONE, messages, {"change": ones, "model": ones}, None)
    assert sent["change"]["a"].item() == pytest.approx(3.0) and sent["model"]["a"].item() == pytest.approx(1 + 4.0)


def test_noise_is_clip_times_its_multiple_and_another_for_each_seed_round_and_client():
    zeros = {"a": np.zeros((2, 20_000), np.float32)}
    noise, _ = sent(zeros, clients=np.array([1, 2]), clip=4.0, noise=0.5)
    assert noise["a"].std().item() == pytest.approx(2.0, rel=0.02) and abs(noise["a"].mean().item()) < 0.03
    again, _ = sent({"a": zeros["a"][1]}, clients=np.array([2]), clip=4.0, noise=0.5)
    assert torch.equal(again["a"][0], noise["a"][1]), "whoever is computed with it"
    others = [
        sent({"a": zeros["a"][1]}, clients=np.array([2]), clip=4.0, noise=0.5, **key)[0]["a"]
        for key in ({"seed": 1}, {"round": 2})
    ]
    drawn = [noise["a"][0], noise["a"][1], *(other[0] for other in others)]
    assert not any(torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])


def test_the_largest_values_are_sent_and_the_others_wait_and_are_added():
    first, left = sent({"a": [1.0, -5.0], "b": [2.0, 0.5]}, residual=[0.0, 0, 0, 0], top_k=0.25)
    assert first["a"].tolist() == [[0.0, -5.0]] and first["b"].tolist() == [[0.0, 0.0]]
    assert left.tolist() == [[1.0, 0.0, 2.0, 0.5]]
    second, left = sent({"a": [0.5, 1.0], "b": [0.0, 0.0]}, residual=left[0].tolist(), top_k=0.25)
    assert second["b"].tolist() == [[2.0, 0.0]] and left.tolist() == [[1.5, 1.0, 0.0, 0.5]]


def test_of_equal_magnitudes_the_first_are_sent():
    message, _ = sent({"a": [1.0, -2.0, 1.0, -1.0, 2.0, 1.0]}, residual=[0.0] * 6, top_k=0.5)
    assert message["a"].tolist() == [[1.0, -2.0, 0.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rounding_has_so_many_levels_no_bias_and_leaves_the_largest_and_zero(bits):
    levels, count = 2 ** (bits - 1) - 1, 40_000
    value = 0.4 / levels  # between zero and the first level
    values = np.array([[1.5, 0.0, *[value * 1.5] * count]], np.float32)
    (rounded,) = sent({"a": values[0]}, quantise=bits)[0]["a"]
    assert rounded[0] == 1.5 and rounded[1] == 0
    at = rounded.double() / 1.5 * levels
    assert torch.allclose(at, at.round(), atol=1e-4) and set(at.round().int().tolist()) == {0, 1, levels}
    assert at[2:].mean().item() == pytest.approx(0.4, abs=4 * (0.24 / count) ** 0.5)


def test_each_tensor_and_each_class_mean_has_a_scale_of_its_own():
    model, _ = sent({"a": [1e-3, -1e-3], "b": [7.0], "c": [0.0, 0.0]}, quantise=4)
    assert model["a"].tolist() == [[pytest.approx(1e-3), pytest.approx(-1e-3)]]
    assert model["b"].item() == 7 and model["c"].tolist() == [[0.0, 0.0]]
    up = {"means": ClassMeans(2)}
    means = torch.tensor([[[1e-3, -1e-3], [7.0, 7.0], [0.0, 0.0]]])
    counts = torch.tensor([[5, 3, 0]], dtype=torch.int32)
    done, _ = transform(
        UplinkConfig(quantise=4), up, 0, 1, ONE, {"means": {"means": means, "counts": counts}}, {}, None
    )
    assert torch.allclose(done["means"]["means"], means) and torch.equal(done["means"]["counts"], counts)


def test_error_feedback_has_what_rounding_takes_away():
    model, left = sent({"a": [1.0, 0.55, 0.1, 0.0]}, residual=[0.0] * 4, top_k=0.5, quantise=4)
    assert model["a"][0, 2] == 0 and torch.equal(left[0], torch.tensor([1.0, 0.55, 0.1, 0.0]) - model["a"][0])
    assert left[0, 1] != 0


def test_what_is_transformed_is_not_changed_in_place():
    rows = torch.tensor([[3.0, 4.0]])
    transform(
        UplinkConfig(clip=1.0),
        {"m": Mean({"a": tensor(2)})},
        0,
        1,
        ONE,
        {"m": {"a": rows}},
        {"m": {"a": torch.zeros(1, 2)}},
        None,
    )
    assert rows.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("keys", "model", "means"),
    [
        ({}, 4 * 105, 3 * (4 * 7 + 8)),
        ({"clip": 1.0, "noise": 1.0}, 4 * 105, 3 * (4 * 7 + 8)),
        ({"quantise": 8}, 105 + 2 * 4, 3 * (7 + 4 + 8)),
        ({"quantise": 4}, 53 + 2 * 4, 3 * (4 + 4 + 8)),
        ({"quantise": 16}, 210 + 2 * 4, 3 * (14 + 4 + 8)),
        ({"top_k": 0.1}, 11 * (4 + 4), None),
        ({"top_k": 0.1, "quantise": 8}, 11 * (4 + 1) + 2 * 4, None),
    ],
)
def test_logical_bytes_are_those_of_the_transformed_message_and_ranks_send_float32(keys, model, means):
    holds, like = np.array([[True] * 3 + [False]]), {"a": tensor(5, 20), "b": tensor(5)}
    for kind, expected in ((Mean(like), model), (ClassMeans(7), means)):
        if expected is not None:
            what = Declared({"m": kind}, {"m": Shared(like)}, holds, np.array([9]), UplinkConfig(**keys))
            assert what.up_bytes(np.array([0])).tolist() == [expected]
            assert what.returned_bytes(np.array([0])).tolist() == [kind.client_bytes(3)]
    what = Declared({"m": Rows(like)}, {}, holds, np.array([9]), UplinkConfig(**keys))
    assert what.up_bytes(np.array([0])).tolist() == [420]


def test_without_transforms_every_type_counts_as_it_is():
    like = {"x": tensor(3), "counter": tensor(dtype=torch.int64), "wide": tensor(2, dtype=torch.float64)}
    what = Declared({"m": Mean(like)}, {}, np.ones((1, 2), bool), np.array([9]))
    assert what.up_bytes(np.array([0])).tolist() == [3 * 4 + 8 + 2 * 8]

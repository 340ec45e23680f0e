"""HeurFedAMP: weights by the cosine of models, in NumPy from the paper's equation."""

import numpy as np
import pytest
import torch

import small_task
from pflmpi import tree
from pflmpi.algorithms.base import Round
from pflmpi.algorithms.fedamp import FedAMP


def models(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    like = small_task.task().init()
    return tree.map(lambda leaf: torch.randn(count, *leaf.shape, generator=generator), like)


def flat(rows):
    return np.concatenate([leaf.flatten(1).double().numpy() for _, leaf in tree.leaves(rows)], 1)


def heuristic(w, scale, own):
    """xi [P, P], entry by entry."""
    xi = np.eye(len(w)) * own
    for i, w_i in enumerate(w):
        similar = {
            j: np.exp(scale * (w_i @ w_j) / np.sqrt((w_i @ w_i) * (w_j @ w_j))) for j, w_j in enumerate(w) if j != i
        }
        for j, value in similar.items():
            xi[i, j] = (1 - own) * value / sum(similar.values())
    return xi


@pytest.mark.parametrize("scale, own", [(10.0, 0.5), (3.0, 0.2), (0.0, 0.1), (5.0, 1.0)])
def test_weights_are_a_softmax_over_the_others_beside_the_self_weight(scale, own):
    algorithm = FedAMP(weighting="cosine", cosine_scale=scale, self_weight=own)
    rows = models(4)
    np.testing.assert_allclose(algorithm.weights(rows), heuristic(flat(rows), scale, own), atol=1e-12)


def test_weights_do_not_depend_on_the_length_of_a_model():
    algorithm, rows = FedAMP(weighting="cosine"), models(3)
    longer = tree.map(lambda leaf: leaf * torch.tensor([1.0, 4.0, 0.5]).view(-1, *[1] * (leaf.ndim - 1)), rows)
    np.testing.assert_allclose(algorithm.weights(rows), algorithm.weights(longer), atol=1e-12)


def test_a_large_scale_listens_to_the_most_similar_alone_without_overflow():
    rows = models(3)
    near = tree.map(lambda leaf: torch.cat([leaf, leaf[:1] * 1.5]), rows)
    weights = FedAMP(weighting="cosine", cosine_scale=1e6, self_weight=0.25).weights(near)
    np.testing.assert_allclose(weights[0], [0.25, 0, 0, 0.75], atol=1e-12)


def test_a_participant_alone_keeps_its_own_model():
    assert FedAMP(weighting="cosine", self_weight=0.2).weights(models(1)).tolist() == [[1.0]]


def test_a_model_of_zeros_is_like_no_other():
    rows = tree.map(lambda leaf: leaf * torch.tensor([0.0, 1.0, 1.0]).view(-1, *[1] * (leaf.ndim - 1)), models(3))
    weights = FedAMP(weighting="cosine", self_weight=0.5).weights(rows)
    np.testing.assert_allclose(weights[0], [0.5, 0.25, 0.25], atol=1e-12)


def test_the_cloud_models_of_participants_are_mixed_by_these_weights():
    task, algorithm = small_task.task(clients=4), FedAMP(weighting="cosine", cosine_scale=4.0, self_weight=0.3)
    up = models(2)
    new = algorithm.answer(task, {}, {"model": up}, Round(1, np.array([1, 3]), 0))
    np.testing.assert_allclose(flat(new["cloud"]), np.array([[0.3, 0.7], [0.7, 0.3]]) @ flat(up), atol=1e-6)


def test_by_distance_the_fields_of_the_heuristic_do_nothing():
    seen = models(3)
    assert torch.equal(FedAMP().weights(seen), FedAMP(cosine_scale=1.0, self_weight=0.9).weights(seen))
    assert not torch.equal(FedAMP().weights(seen), FedAMP(weighting="cosine").weights(seen))


def test_training_starts_from_the_own_model_or_from_the_cloud_model():
    task = small_task.task()
    own, cloud = task.init(), tree.map(lambda leaf: leaf + 1, task.init())
    for start, expected in (("own", own), ("cloud", cloud)):
        algorithm = FedAMP(start=start)
        data = small_task.data([small_task.batch(0)], lr=0.0)
        state, _ = algorithm.client_update(task, {"model": own}, {"cloud": cloud}, data)
        assert not tree.differences(state["model"], expected)
        for (path, state_leaf), (_, expected_leaf) in zip(
            tree.leaves(state["model"]), tree.leaves(expected), strict=True
        ):
            assert torch.equal(state_leaf, expected_leaf), path

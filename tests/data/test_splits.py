"""Training and test samples of a client: its own split, and the official one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_helpers import rng
from pflmpi.data.splits import official_by_class, split_pooled
from pflmpi.errors import DataError

# --- pooled -------------------------------------------------------------------------------------------------


def split_of(sizes, share=0.25, seed=0):
    """Return training and test counts per class of a client with that many samples of each class."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, test = split_pooled(1000 + np.arange(len(labels)), labels, share, rng(seed))
    assert np.array_equal(np.sort(np.concatenate([train, test])), 1000 + np.arange(len(labels)))
    counts = [np.bincount(labels[part - 1000], minlength=len(sizes)).tolist() for part in (train, test)]
    return counts[0], counts[1]


def test_a_client_is_split_75_to_25_in_every_class():
    assert split_of([8, 4, 40]) == ([6, 3, 30], [2, 1, 10])
    assert split_of([20, 80]) == ([15, 60], [5, 20])
    assert split_of([100]) == ([75], [25])
    assert split_of([10, 10], share=0.5) == ([5, 5], [5, 5])


def test_every_class_keeps_a_training_sample_and_every_client_gets_a_test_sample():
    assert split_of([1, 7]) == ([1, 5], [0, 2])
    assert split_of([2]) == ([1], [1])
    assert split_of([1]) == ([1], [0])
    assert split_of([1, 1, 2], share=0.9) == ([1, 1, 1], [0, 0, 1])
    assert split_of([3, 1], share=0.01) == ([2, 1], [1, 0])
    # One of each class: somebody has to be the test sample.
    assert {tuple(split_of([1, 1, 1], seed=seed)[1]) for seed in range(30)} == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


@settings(deadline=None, derandomize=True, database=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), share=st.floats(0.01, 0.99))
def test_any_split_is_as_stratified_as_whole_samples_allow(sizes, share):
    train, test = split_of(sizes, share)
    total = sum(sizes)
    assert sum(train) >= 1 and (total < 2 or sum(test) >= 1)
    if max(sizes) > 1:
        assert min(train) >= 1
        wanted = int(np.floor(share * total + 0.5))
        assert sum(test) == max(1, min(wanted, total - len(sizes)))


def test_test_samples_are_drawn_at_random():
    labels = np.zeros(40, dtype=np.int64)
    tests = [split_pooled(np.arange(40), labels, 0.25, rng(seed))[1].tolist() for seed in range(2)]
    assert tests[0] != tests[1] and tests[0] != list(range(30, 40))


# --- official -----------------------------------------------------------------------------------------------


def official_counts(train_counts, tests, per_class=None):
    labels = np.repeat(np.arange(len(tests)), tests)
    parts = official_by_class(np.array(train_counts), labels, np.arange(len(labels)), rng(), per_class)
    given = np.concatenate(parts)
    assert len(np.unique(given)) == len(given)
    return [np.bincount(labels[part], minlength=len(tests)).tolist() for part in parts]


def test_official_test_samples_follow_the_training_counts_of_each_class():
    assert official_counts([[30, 0], [10, 5], [0, 15]], [8, 4]) == [[6, 0], [2, 1], [0, 3]]


def test_every_holder_of_a_class_may_have_the_same_number_of_its_test_samples():
    assert official_counts([[30, 0], [10, 5], [0, 15]], [8, 4], 2) == [[2, 0], [2, 2], [0, 2]]
    with pytest.raises(DataError, match=r"data.test_per_class = 3: class 1 has 4 test samples for 2 clients; lower it"):
        official_counts([[30, 0], [10, 5], [0, 15]], [8, 4], 3)


def test_official_test_samples_of_a_class_that_nobody_holds_are_left_out():
    assert official_counts([[3, 0], [3, 0]], [4, 5]) == [[2, 0], [2, 0]]


def test_a_client_without_official_test_samples_takes_one_of_its_classes():
    # 99 : 1 of 10 would leave nothing for the second client.
    assert official_counts([[99, 20], [1, 0]], [10, 3]) == [[9, 3], [1, 0]]
    # The only test sample of class 1 stays where it is needed as much.
    assert official_counts([[0, 5], [0, 4]], [3, 1]) == [[0, 1], [0, 0]]

"""Training and test samples of a client: its own split, and the official one."""

import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition_helpers import rng
from pflmpi.data.config import DataConfig, PartitionConfig
from pflmpi.data.dataset import assemble
from pflmpi.data.federation import build
from pflmpi.data.splits import apportion, assign_official_by_class, assign_official_by_writer, split_pooled
from pflmpi.errors import DataError
from pflmpi.rng import stream, streams

# --- pooled -------------------------------------------------------------------------------------------------


def split_one(samples, labels, share, rng):
    """The split of a single client; labels [n] are those of its samples."""
    of_dataset = np.zeros(samples.max() + 1, np.int64)
    of_dataset[samples] = labels
    (train,), (test,) = split_pooled([samples], of_dataset, share, lambda clients: iter([rng] * len(clients)))
    return train, test


def split_of(sizes, share=0.25, seed=0):
    """Return training and test counts per class of a client with that many samples of each class."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    train, test = split_one(1000 + np.arange(len(labels)), labels, share, rng(seed))
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
    tests = [split_one(np.arange(40), labels, 0.25, rng(seed))[1].tolist() for seed in range(2)]
    assert tests[0] != tests[1] and tests[0] != list(range(30, 40))


def plain_split(samples, labels, share, rng):
    """The split of one client in plain words: class by class, each shuffled and cut."""
    classes, sizes = np.unique(labels, return_counts=True)
    num_test = min(int(np.floor(share * len(samples) + 0.5)), len(samples) - len(classes))
    if num_test == 0 and len(samples) > len(classes):
        num_test = 1
    num_train = apportion(len(samples) - num_test, sizes - 1, floor=1)
    if num_test == 0 and len(samples) > 1:
        num_train[rng.integers(len(classes))] = 0
    shuffled = [rng.permutation(samples[labels == label]) for label in classes]
    sides = [part[:count] for part, count in zip(shuffled, num_train, strict=True)]
    tests = [part[count:] for part, count in zip(shuffled, num_train, strict=True)]
    return np.sort(np.concatenate(sides)), np.sort(np.concatenate(tests))


@pytest.mark.parametrize("seed", range(20))
def test_all_clients_at_once_are_split_as_each_alone(seed):
    draw = np.random.default_rng(seed)
    labels, share = draw.integers(0, draw.integers(1, 9), 300), draw.uniform(0.01, 0.99)
    parts = [draw.permutation(300)[: draw.integers(1, 60 if seed % 2 else 6)] for _ in range(30)]  # some overlap
    train, test = split_pooled(parts, labels, share, partial(streams, seed, 0, purpose="split"))
    for client, samples in enumerate(parts):
        expected = plain_split(samples, labels[samples], share, stream(seed, 0, client, "split"))
        assert np.array_equal(train[client], expected[0]) and np.array_equal(test[client], expected[1])


def test_a_federation_of_very_many_clients_takes_few_seconds():
    clients = 20_000
    y, whose = np.arange(4 * clients) % 10, np.repeat(np.arange(clients), 4)
    x, official = np.zeros((len(y), 1), np.float32), np.zeros(len(y), bool)
    dataset = assemble("many", x, y, official, 10, whose, "no digest")
    began = time.process_time()
    federation = build(dataset, PartitionConfig("writers"), DataConfig(name="many"), 0)
    assert time.process_time() - began < 40e-6 * clients, "seconds of the processor; one by one it takes thrice that"
    assert federation.num_train.tolist() == [3] * clients


# --- official -----------------------------------------------------------------------------------------------


def official_counts(train_counts, tests, per_class=None):
    labels = np.repeat(np.arange(len(tests)), tests)
    parts = assign_official_by_class(np.array(train_counts), labels, np.arange(len(labels)), rng(), per_class)
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


def test_official_test_samples_of_a_writer_are_its_clients():
    writers = np.array([5, 2, 2, 9, 5, 2, 7, 5])  # the last four are test samples
    train = [np.array([3]), np.array([0]), np.array([1, 2])]
    parts = assign_official_by_writer(train, writers, np.array([4, 5, 6, 7]))
    assert [part.tolist() for part in parts] == [[], [4, 7], [5]]

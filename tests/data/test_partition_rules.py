"""What each partition promises, checked by hand."""

import time
from itertools import chain

import numpy as np
import pytest

from partition_helpers import counts_of, rng
from pflmpi.data.partitions import PARTITIONS, pfllib
from pflmpi.data.partitions.by_label import deal_labels
from pflmpi.data.partitions.dirichlet import draw_counts, draw_labels
from pflmpi.data.splits import apportion
from pflmpi.errors import DataError

# --- shares -------------------------------------------------------------------------------------------------


def test_apportion_rounds_by_largest_remainder():
    assert apportion(10, np.array([1.0, 1.0, 1.0])).tolist() == [4, 3, 3]
    assert apportion(10, np.array([0.26, 0.26, 0.48])).tolist() == [3, 2, 5]  # 2.6, 2.6, 4.8
    assert apportion(10, np.array([9.0, 1.0, 0.0]), floor=2).tolist() == [6, 2, 2]  # 2 each, 3.6 and .4 of 4
    assert apportion(5, np.zeros(2)).tolist() == [3, 2]
    assert apportion(0, np.ones(3)).tolist() == [0, 0, 0]


# --- pathological -------------------------------------------------------------------------------------------


def test_labels_are_dealt_evenly():
    for clients, per_client, classes in ((20, 2, 10), (7, 3, 10), (5, 2, 10), (100, 10, 100), (3, 4, 4)):
        holds = deal_labels(clients, per_client, classes, rng(clients), "random")
        assert (holds.sum(axis=1) == per_client).all()
        holders = holds.sum(axis=0)
        assert holders.max() - holders.min() <= 1 and holders.sum() == clients * per_client


def test_labels_are_dealt_in_contiguous_groups_or_cyclically():
    def dealt_labels(pairing, clients, per_client):
        holds = deal_labels(clients, per_client, 10, rng(), pairing)
        return [np.flatnonzero(row).tolist() for row in holds]

    assert dealt_labels("contiguous", 7, 2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1], [2, 3]]
    assert dealt_labels("contiguous", 4, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]
    assert dealt_labels("cyclic", 10, 3)[:2] == [[0, 1, 2], [1, 2, 3]] and dealt_labels("cyclic", 10, 3)[9] == [0, 1, 9]
    with pytest.raises(DataError, match=r"partition.pairing = 'cyclic': 5 clients leave class number 6 without a"):
        dealt_labels("cyclic", 5, 2)
    labels = np.repeat(np.arange(10), 100)
    parts = PARTITIONS["pathological"](labels, 20, rng(), classes_per_client=2, pairing="contiguous")
    assert [np.unique(labels[part]).tolist() for part in parts[3:6]] == [[6, 7], [8, 9], [0, 1]]


def test_pathological_clients_hold_exactly_the_given_number_of_labels():
    labels = np.repeat(np.arange(10), 100)
    for balanced in (False, True):
        counts = counts_of(
            PARTITIONS["pathological"](labels, 20, rng(), classes_per_client=2, balanced=balanced), labels
        )
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert ((counts > 0).sum(axis=0) == 4).all(), "20 clients with 2 of 10 labels: 4 holders each"
        pieces = counts[counts > 0]
        if balanced:
            assert (pieces == 25).all()
        else:
            assert pieces.max() - pieces.min() > 25 and pieces.max() <= 10 * (pieces.min() + 1)


@pytest.mark.parametrize("name", ["pathological", "exdir", "lognormal"])
def test_impossible_numbers_of_classes_are_refused(name):
    labels = np.repeat(np.arange(10), 100)
    parameters = {"pathological": {}, "exdir": {"alpha": 0.5}, "lognormal": {"sigma": 1.0}}[name]
    with pytest.raises(DataError, match=r"partition\.classes_per_client = 11, but the data has 10 classes"):
        PARTITIONS[name](labels, 20, rng(), **parameters | {"classes_per_client": 11})
    with pytest.raises(DataError, match="4 clients with 2 classes each hold 8 classes at most, the data has 10"):
        PARTITIONS[name](labels, 4, rng(), **parameters | {"classes_per_client": 2})


def test_a_class_with_fewer_samples_than_holders_is_refused():
    labels = np.array([0] * 50 + [7] * 3)
    with pytest.raises(DataError, match="class 7 has 3 samples for 4 clients that hold it"):
        PARTITIONS["pathological"](labels, 4, rng(), classes_per_client=2)


def test_classes_are_those_that_occur():
    labels = np.repeat([3, 50, 61], 20)
    counts = counts_of(PARTITIONS["pathological"](labels, 3, rng(), classes_per_client=1, balanced=True), labels)
    assert sorted(np.argmax(counts, axis=1).tolist()) == [3, 50, 61]


# --- dirichlet ----------------------------------------------------------------------------------------------


def test_dirichlet_is_even_for_a_large_beta_and_skewed_for_a_small_one():
    labels = np.repeat(np.arange(10), 100)
    even = counts_of(PARTITIONS["dirichlet"](labels, 10, rng(), beta=1e9), labels)
    assert abs(even - 10).max() <= 1
    skewed = counts_of(PARTITIONS["dirichlet"](labels, 10, rng(), beta=0.05, min_samples=1), labels)
    assert np.median(skewed.max(axis=0)) > 60, "most of a class is with one client"


def test_dirichlet_proportions_have_the_mean_and_variance_of_their_law():
    sizes, holds = np.array([100_000]), np.ones((4, 1), dtype=bool)
    shares = np.stack([draw_counts(sizes, holds, 0.5, False, rng(seed))[:, 0] for seed in range(2000)]) / sizes
    # A share of Dir(0.5) over 4 is Beta(0.5, 1.5): mean 1/4, variance 0.5 * 1.5 / (2^2 * 3) = 1/16.
    # Standard error of the mean is 0.0056 here, of the variance about 0.0016; allowed are four of them.
    assert abs(shares.mean(axis=0) - 1 / 4).max() < 0.0224
    assert abs(shares.var(axis=0) - 1 / 16).max() < 0.0064


def test_of_clients_a_class_is_cut_in_proportion_to_each_client_s_own_draw():
    labels = np.repeat(np.arange(10), 1000)
    counts = counts_of(
        PARTITIONS["dirichlet"](labels, 5, rng(3), beta=0.5, min_samples=1, proportions="of_clients"), labels
    )
    own = rng(3).dirichlet(np.full(10, 0.5), 5)  # equation 11: the first thing that is drawn
    assert (counts.sum(axis=0) == 1000).all() and abs(counts - 1000 * own / own.sum(axis=0)).max() < 1


def test_the_floor_is_met_by_redrawing():
    labels = np.repeat(np.arange(10), 100)
    for seed in range(5):
        parts = PARTITIONS["dirichlet"](labels, 10, rng(seed), beta=0.2, min_samples=25)
        assert min(len(part) for part in parts) >= 25


@pytest.mark.parametrize("name", ["dirichlet", "exdir"])
def test_a_floor_that_is_never_met_ends_in_an_error_with_the_numbers(name):
    labels = np.repeat(np.arange(10), 100)
    parameters = {"beta": 0.01} if name == "dirichlet" else {"alpha": 0.01, "classes_per_client": 2}
    with pytest.raises(
        DataError, match=r"40 draws .* = 0\.01 .* 1000 samples .* 20 clients has 45 .*; raise partition\."
    ):
        PARTITIONS[name](labels, 20, rng(), **parameters, min_samples=45, max_tries=40)
    with pytest.raises(
        DataError, match="20 clients with at least 51 samples each need 1020 samples, the data has 1000"
    ):
        PARTITIONS[name](labels, 20, rng(), **parameters, min_samples=51)


def test_a_client_with_its_even_share_gets_no_more_under_the_cap():
    # Classes are given out in order. The even share is 15; client 0 alone holds classes 0 and 1, so it has 20 of them
    # and class 2 goes to client 1 whole.
    holds = np.array([[True, True, True], [False, False, True]])
    for seed in range(10):
        counts = draw_counts(np.array([10, 10, 10]), holds, 0.5, True, rng(seed))
        assert counts.tolist() == [[10, 10, 0], [0, 0, 10]]
    free = [draw_counts(np.array([10, 10, 10]), holds, 5.0, False, rng(seed))[0, 2] for seed in range(10)]
    assert max(free) > 0, "without the cap client 0 gets of class 2"


def test_a_label_whose_holders_all_have_their_share_is_still_given_out():
    alone = draw_counts(np.array([10, 10]), np.array([[True, True], [False, False]]), 0.5, True, rng())
    assert alone.tolist() == [[10, 10], [0, 0]]


# --- exdir --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "each", "classes", "wanted"),
    [(20, 2, 10, 2), (100, 2, 10, 10), (100, 5, 100, 2), (5, 2, 10, 1), (10, 1, 3, 1)],
)
def test_exdir_labels_have_at_least_half_their_mean_number_of_holders(clients, each, classes, wanted):
    for seed in range(10):
        holds = draw_labels(clients, each, classes, 20_000, rng(seed))
        assert (holds.sum(axis=1) == each).all()
        assert holds.sum(axis=0).min() >= wanted == max(1, each * clients // classes // 2)


def test_exdir_draws_all_label_sets_equally_often():
    drawn = np.stack([draw_labels(20, 2, 10, 1000, rng(seed)) for seed in range(200)]).reshape(-1, 10)
    pairs = drawn.T.astype(int) @ drawn  # [10, 10], how often two labels were drawn together
    together = pairs[np.triu_indices(10, 1)]
    # 4000 sets over 45 pairs: 88.9 on average, standard deviation 9.3; allowed are four and a half of them.
    assert together.sum() == 4000 and abs(together - 4000 / 45).max() < 42


def test_exdir_that_finds_no_holders_ends_in_an_error():
    with pytest.raises(DataError, match=r"50 draws of 2 labels for each of 10 clients gave no set .* 20 labels has 1"):
        draw_labels(10, 2, 20, 50, rng())


@pytest.mark.parametrize(
    ("classes", "samples", "each", "alpha"), [(10, 7000, 2, 0.5), (10, 7000, 2, 5.0), (100, 600, 5, 0.5)]
)
def test_exdir_for_the_hundred_clients_of_the_papers_is_quick(classes, samples, each, alpha):
    labels = np.repeat(np.arange(classes), samples)
    start = time.perf_counter()
    for seed in range(3):
        parts = PARTITIONS["exdir"](labels, 100, rng(seed), classes_per_client=each, alpha=alpha)
        counts = counts_of(parts, labels)
        assert (counts.sum(axis=0) == samples).all() and counts.sum(axis=1).min() >= 10
        assert (counts > 0).sum(axis=1).max() <= each
    assert time.perf_counter() - start < 10, "three partitions take about 0.3 seconds"


# --- nway_kshot ---------------------------------------------------------------------------------------------


def test_nway_kshot_draws_about_n_labels_and_about_k_samples_of_each():
    labels = np.repeat(np.arange(10), 2000)
    counts = counts_of(PARTITIONS["nway_kshot"](labels, 40, rng(), n=4, k=100, stdev=1, noise=3), labels)
    assert set((counts > 0).sum(axis=1)) == {3, 4, 5}
    assert set(counts[counts > 0]) == set(range(97, 104))
    # Never a single label where n is larger: 2 up to 5 for n = 3, stdev = 2.
    counts = counts_of(PARTITIONS["nway_kshot"](labels, 60, rng(), n=3, stdev=2), labels)
    assert set((counts > 0).sum(axis=1)) == {2, 3, 4, 5}
    counts = counts_of(PARTITIONS["nway_kshot"](labels, 3, rng(), n=10, stdev=0, noise=0), labels)
    assert (counts == 100).all()


def test_clients_share_samples_only_when_the_pool_runs_out():
    labels = np.repeat([0, 1], 20)
    exact = {"n": 2, "k": 10, "stdev": 0, "noise": 0}
    two = PARTITIONS["nway_kshot"](labels, 2, rng(), **exact)
    assert np.array_equal(np.sort(np.concatenate(two)), np.arange(40))
    three = PARTITIONS["nway_kshot"](labels, 3, rng(), **exact)
    times = np.bincount(np.concatenate(three), minlength=40)
    assert np.bincount(times).tolist() == [0, 20, 20], "60 places for 40 samples: each once, and half of them twice"
    # 15 of 20: the second client gets the 5 that are left and 10 others, none of them twice.
    parts = PARTITIONS["nway_kshot"](labels, 2, rng(), **exact | {"k": 15})
    assert all(len(np.unique(part)) == 30 for part in parts)
    assert len(np.unique(np.concatenate(parts))) == 40


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n": 11}, r"partition\.n = 11, but the data has 10 classes"),
        (
            {"n": 3, "k": 49, "noise": 2},
            r"49 \+ 2 samples of one label, but class 4 has 50; lower partition\.k to at most 48",
        ),
        ({"n": 3, "k": 3, "noise": 3}, r"partition\.noise = 3 with partition\.k = 3"),
    ],
)
def test_impossible_shots_are_refused(parameters, message):
    labels = np.repeat(np.arange(10), np.where(np.arange(10) == 4, 50, 100))
    with pytest.raises(DataError, match=message):
        PARTITIONS["nway_kshot"](labels, 5, rng(), **parameters)


# --- lognormal, iid, writers --------------------------------------------------------------------------------


def test_lognormal_holds_exact_labels_and_the_floor_and_varies_widely():
    labels = np.repeat(np.arange(10), 4000)
    counts = counts_of(
        PARTITIONS["lognormal"](labels, 20, rng(), classes_per_client=2, sigma=2.0, min_samples=9), labels
    )
    assert ((counts > 0).sum(axis=1) == 2).all()
    pieces = counts[counts > 0]
    assert pieces.min() >= 5, "ceil(9 / 2) of each label"
    assert pieces.max() / np.median(pieces) > 5
    even = PARTITIONS["lognormal"](labels, 20, rng(), classes_per_client=2, sigma=0.0, factor=0.0)
    assert {len(part) for part in even} == {2000}
    with pytest.raises(DataError, match=r"class 0 has 30 samples for 4 .*, at least 10 each .* partition\.min_samples"):
        PARTITIONS["lognormal"](labels[3970:], 20, rng(), classes_per_client=2, sigma=1.0, min_samples=20)


def test_lognormal_counts_are_drawn_as_numbers_and_cut_to_what_is_left():
    labels = np.repeat(np.arange(10), 7000)
    options = {"classes_per_client": 4, "sigma": 2.0, "pairing": "cyclic", "sizes": "counts"}
    counts = counts_of(PARTITIONS["lognormal"](labels, 20, rng(1), **options), labels)
    assert [np.flatnonzero(row).tolist() for row in counts[:2]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    drawn = rng(1)
    normal = np.floor(drawn.lognormal(0.0, 2.0, (20, 10)))
    wanted = 2 * (normal * drawn.integers(1, 11, (20, 10)) + drawn.integers(10, 201, (20, 10)) + 200)
    assert (counts[:3][counts[:3] > 0] == wanted[:3][counts[:3] > 0]).all(), "at first there is enough of everything"
    assert (counts.sum(axis=0) <= 7000).all()
    with pytest.raises(DataError, match=r"client \d+ has \d+ samples and needs 10: .* lower partition.clients"):
        PARTITIONS["lognormal"](labels[::100], 20, rng(1), **options)


def test_iid_parts_are_equal_or_not_and_look_like_the_whole():
    labels = np.repeat(np.arange(10), 1003)
    sizes = [len(part) for part in PARTITIONS["iid"](labels, 4, rng())]
    assert sizes == [2508, 2508, 2507, 2507]
    parts = PARTITIONS["iid"](labels, 4, rng(), balanced=False)
    assert len({len(part) for part in parts}) == 4
    counts = counts_of(parts, labels)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert abs(shares - 0.1).max() < 0.05, "four standard deviations for a part of 600 samples"


def test_writers_are_the_clients():
    who = np.array([7, 3, 7, 9, 3, 7], dtype=np.int64)
    assert [part.tolist() for part in PARTITIONS["writers"](who, None, rng())] == [[1, 4], [0, 2, 5], [3]]
    assert [part.tolist() for part in PARTITIONS["writers"](who, None, rng(), min_samples=2)] == [[1, 4], [0, 2, 5]]
    choices = {tuple(int(who[part[0]]) for part in PARTITIONS["writers"](who, 2, rng(seed))) for seed in range(30)}
    assert choices == {(3, 7), (3, 9), (7, 9)}, "a seeded choice, in the order of the writers"
    with pytest.raises(DataError, match=r"2 writers with at least 2 samples \(of 3\), 3 are needed"):
        PARTITIONS["writers"](who, 3, rng(), min_samples=2)


# --- PFLlib's draws -----------------------------------------------------------------------------------------


def test_pfllib_cuts_contiguous_groups_and_splits_them_as_its_generator_does():
    """RandomState(1): randint(5, 20) gives 10, then 16, of the even share of 20."""
    parts = PARTITIONS["pathological"](
        np.repeat([0, 1], 40), 4, rng(), classes_per_client=1, pairing="contiguous", draw="pfllib"
    )
    assert [(train.tolist(), test.tolist()) for train, test in parts] == [
        ([0, 1, 5, 6, 7, 8, 9], [2, 3, 4]),
        (
            [10, 11, 14, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25, 27, 28, 30, 33, 34, 35, 36, 37, 39],
            [12, 13, 18, 26, 29, 31, 32, 38],
        ),
        ([41, 43, 44, 45, 46, 47, 48, 49, 50, 51, 54, 55], [40, 42, 52, 53]),
        ([56, 57, 58, 60, 62, 63, 64, 65, 66, 68, 69, 70, 71, 72, 74, 75, 76, 79], [59, 61, 67, 73, 77, 78]),
    ]


def test_the_last_clients_of_pfllib_may_hold_fewer_labels():
    labels = np.repeat([0, 1, 2], 400)
    parts = PARTITIONS["pathological"](labels, 8, rng(), classes_per_client=2, pairing="contiguous", draw="pfllib")
    assert [len(np.unique(labels[np.concatenate(part)])) for part in parts] == [2, 2, 2, 2, 2, 2, 1, 1]


def test_pfllib_shuffles_a_class_before_it_draws_the_shares_and_caps_who_has_enough():
    """What PFLlib's own code gives for these labels: its floor for 24 samples of 2 clients is 6."""
    parts = PARTITIONS["dirichlet"](
        np.repeat([0, 1], 12), 2, rng(), beta=0.1, balanced_cap=True, min_samples=6, draw="pfllib"
    )
    assert [(train.tolist(), test.tolist()) for train, test in parts] == [
        ([3, 10, 12, 13, 14, 15, 16, 17, 18, 19, 22], [2, 4, 20, 21]),
        ([0, 1, 6, 7, 8, 11], [5, 9, 23]),
    ]


def test_pfllib_cuts_labels_among_their_holders_and_gives_the_last_one_what_rounding_leaves():
    """What FedGMH's own code gives for these labels."""
    parts = PARTITIONS["exdir"](
        np.repeat([0, 1, 2, 3], [5, 11, 8, 24]), 4, None, classes_per_client=2, alpha=5, draw="pfllib"
    )
    tests = [[16, 18, 40], [0, 30, 45], [1, 25, 38, 41], [6, 7, 10, 14]]
    assert [test.tolist() for _, test in parts] == tests and [len(train) for train, _ in parts] == [8, 7, 9, 10]
    assert sorted(np.concatenate([*chain(*parts)]).tolist()) == [*range(48)]


def test_pfllib_gives_a_label_whose_holders_all_have_their_share_to_the_last_of_them():
    """There it divides by zero, which comes to this."""
    labels, holds = np.repeat([0, 1, 2, 3], [6, 6, 2, 4]), np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], bool)
    parts = pfllib.cut_labels(labels, holds, 5.0, True, 1, 1, np.random.RandomState(1), "alpha")
    assert [sorted(labels[part]) for part in parts] == [[0] * 6, [1] * 6 + [2] * 2, [3] * 4]


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        ("pathological", {"classes_per_client": 2}, "partition.pairing = random .* groups are contiguous; set"),
        ("pathological", {"classes_per_client": 3, "pairing": "contiguous"}, "class 9 .* 0 clients"),
        ("dirichlet", {"beta": 0.1, "proportions": "of_clients"}, "partition.proportions = of_clients"),
        ("dirichlet", {"beta": 0.1, "min_samples": 140, "max_tries": 2}, "2 draws of PFLlib's .* raise partition.beta"),
        ("exdir", {"classes_per_client": 2, "alpha": 0.1, "max_tries": 1}, "1 draws of 2 labels .* 1 holders"),
        ("exdir", {"classes_per_client": 9, "alpha": 0.1, "min_samples": 140, "max_tries": 9}, "raise partition.alpha"),
    ],
)
def test_what_pfllib_does_not_draw_is_refused(name, parameters, message):
    with pytest.raises(DataError, match=message):
        PARTITIONS[name](np.repeat(np.arange(10), 100), 7, rng(), draw="pfllib", **parameters)

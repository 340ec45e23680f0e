"""Messages: their size, and the sum whose bits do not depend on the order of the terms."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pflmpi.messages.exact import add_fixed, common_shift, fold_exactly, magnitudes
from pflmpi.messages.kinds import (
    ClassMeans,
    Mean,
    Own,
    OwnClasses,
    Rows,
    Shared,
    tensor,
)


def to_fixed(values, shift):
    fixed = np.zeros(len(values), np.int64)
    add_fixed(fixed, [(values[np.newaxis], np.ones(1))], shift)
    return fixed


def from_fixed(fixed, shift):
    values = np.empty(len(fixed))
    fold_exactly([], [fixed], shift, 1.0, values)
    return values


def fixed_sum(terms):
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    return float(from_fixed(to_fixed(terms, shift).sum(keepdims=True), shift)[0])


def test_sizes_are_the_papers():
    assert ClassMeans(512, counts=False).client_bytes(100) == 100 * (4 * 512 + 4)
    assert round(ClassMeans(512, counts=False).client_bytes(100) / 1024, 2) == 200.39
    assert ClassMeans(50).client_bytes(4) == 4 * (4 * 50 + 4 + 4)
    head = {"weight": tensor(10, 512), "bias": tensor(10)}
    assert OwnClasses(head).client_bytes(100) == 4 * 100 * 5130
    assert Shared(head).client_bytes(3) == Own(head).client_bytes(7) == 4 * 5130
    assert Mean(head).client_bytes(1) == Rows(head).client_bytes(9) == 4 * 5130


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_the_sum_has_the_same_bits_in_every_order_and_grouping(values, random):
    terms = np.array(values, np.float64)
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    fixed = to_fixed(terms, shift)
    cut = random.randint(0, len(terms))
    order = list(range(len(terms)))
    random.shuffle(order)
    assert fixed[order][:cut].sum() + fixed[order][cut:].sum() == fixed.sum()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=100))
@settings(max_examples=200, deadline=None)
def test_the_sum_is_right_to_the_last_float32_bit(values):
    exact = sum((Fraction(value) for value in values), Fraction(0))
    scale = max(abs(Fraction(value)) for value in values)
    # Every term is rounded to 2**-54 of the largest at the worst: 62 bits less the bits that 100 terms need.
    assert abs(Fraction(fixed_sum(np.array(values, np.float64))) - exact) <= scale * len(values) / 2**53


def test_the_sum_of_equal_largest_values_does_not_overflow():
    for terms in (1, 2, 3, 64, 1000):
        values = np.full(terms, np.nextafter(2.0**40, 0))
        assert fixed_sum(values) == pytest.approx(terms * 2.0**40, rel=1e-15)
        assert fixed_sum(-values) == pytest.approx(-terms * 2.0**40, rel=1e-15)


def test_zeros_stay_zero():
    assert fixed_sum(np.zeros(5)) == 0


def test_a_large_message_is_added_in_blocks_that_need_little_memory():
    values = np.random.default_rng(0).normal(0, 0.1, 2**20 + 3).astype(np.float32)
    total = np.arange(len(values))
    expected = total + np.rint(values.astype(np.float64) * 3.0 * 2.0**50).astype(np.int64)
    tracemalloc.start()
    add_fixed(total, [(values[np.newaxis], np.array([3.0]))], 50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(total, expected)
    assert peak < 2**21, "of 4 MiB of values"


def test_the_largest_magnitude_of_each_row_tells_what_is_not_finite():
    leaf = np.array([[1.0, -3.0], [2.0, 0.5], [float("nan"), 9.0], [-float("inf"), 0.0]], np.float32)
    assert magnitudes(leaf)[:2].tolist() == [3.0, 2.0]
    assert np.isfinite(magnitudes(leaf)).tolist() == [True, True, False, False]
    assert magnitudes(np.array([[0.5], [-2.0]])).tolist() == [0.5, 2.0]
    assert magnitudes(np.empty((2, 0))).tolist() == [0.0, 0.0]
    assert magnitudes(np.array([[-(2**31)], [7]], np.int32)).tolist() == [2.0**31, 7.0]

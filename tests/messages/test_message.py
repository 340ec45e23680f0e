"""Messages: their size, and the sum whose bits do not depend on the order of the terms."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pflmpi.messages.exact_fold import common_shift, from_fixed, to_fixed
from pflmpi.messages.kinds import (
    ClassMeans,
    Mean,
    Own,
    OwnClasses,
    Rows,
    Shared,
    tensor,
)


def fixed_sum(terms: np.ndarray) -> float:
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    return float(from_fixed(to_fixed(terms.copy(), shift).sum(keepdims=True), shift)[0])


def test_sizes_are_the_papers() -> None:
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
def test_the_sum_has_the_same_bits_in_every_order_and_grouping(values: list[float], random: object) -> None:
    terms = np.array(values, np.float64)
    shift = int(common_shift(np.array([np.abs(terms).max()]), len(terms))[0])
    fixed = to_fixed(terms, shift)
    cut = random.randint(0, len(terms))  # type: ignore[attr-defined]
    order = list(range(len(terms)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert fixed[order][:cut].sum() + fixed[order][cut:].sum() == fixed.sum()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=100))
@settings(max_examples=200, deadline=None)
def test_the_sum_is_right_to_the_last_float32_bit(values: list[float]) -> None:
    exact = sum((Fraction(value) for value in values), Fraction(0))
    scale = max(abs(Fraction(value)) for value in values)
    # Every term is rounded to 2**-54 of the largest at the worst: 62 bits less the bits that 100 terms need.
    assert abs(Fraction(fixed_sum(np.array(values, np.float64))) - exact) <= scale * len(values) / 2**53


def test_the_sum_of_equal_largest_values_does_not_overflow() -> None:
    for terms in (1, 2, 3, 64, 1000):
        values = np.full(terms, np.nextafter(2.0**40, 0))
        assert fixed_sum(values) == pytest.approx(terms * 2.0**40, rel=1e-15)
        assert fixed_sum(-values) == pytest.approx(-terms * 2.0**40, rel=1e-15)


def test_zeros_stay_zero() -> None:
    assert fixed_sum(np.zeros(5)) == 0

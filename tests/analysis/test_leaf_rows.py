"""Rows of clients are indexed as NumPy indexes the whole array, and no others are read."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices, integer_array_indices

from pflmpi.analysis.checkpoint import LeafRows
from pflmpi.store.layout import Layout

SHAPE = (5, 3, 4)
ALL = np.arange(60).reshape(SHAPE)


class InMemory(LeafRows):
    """Rows of an array in place of those in files."""

    def _read(self, positions):
        return ALL[positions]


ROWS = InMemory(np.arange(5), SHAPE, ALL.dtype, Path(), Layout.unwritten(np.zeros(5, np.int64)), "cohort0", "leaf")


def same(index):
    try:
        expected = ALL[index]
    except IndexError:
        with pytest.raises(IndexError):
            ROWS[index]
        return
    actual = ROWS[index]
    assert np.shape(actual) == np.shape(expected), index
    assert np.array_equal(actual, expected), index


def test_an_empty_index_is_the_whole_array():
    same(())


@given(basic_indices(SHAPE, allow_newaxis=True, allow_ellipsis=True))
def test_slices_numbers_ellipses_and_new_axes(index):
    same(index)


@given(integer_array_indices(SHAPE, result_shape=st.just((2, 3)) | st.just(())))
def test_arrays_on_all_axes(index):
    same(index)


_ARRAYS = st.lists(st.integers(-3, 2), min_size=2, max_size=2)
_FIRST = st.one_of(
    st.integers(-6, 5),
    st.integers(-5, 4).map(np.int64),
    st.slices(5),
    _ARRAYS,
    _ARRAYS.map(np.array),
    st.just([]),
    st.just(np.array([[0, 4], [2, 2]])),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5).map(np.array),
    st.lists(st.booleans(), min_size=15, max_size=15).map(lambda mask: np.array(mask).reshape(5, 3)),
    st.just(np.array(True)),
    st.just(True),
)
_REST = st.one_of(st.integers(-4, 3), st.slices(3), _ARRAYS, _ARRAYS.map(np.array), st.just(...), st.none())


@given(_FIRST, st.lists(_REST, max_size=3))
def test_whatever_stands_first_beside_whatever_follows(first, rest):
    if sum(item is ... for item in rest) <= 1:
        same((first, *rest))
    if not rest:
        same(first)


def test_backwards_with_a_further_axis():
    assert ROWS[::-1, 0].shape == (5, 4)
    assert np.array_equal(ROWS[::-1, 0], ALL[::-1, 0])

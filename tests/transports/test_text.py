"""Texts between ranks arrive whole, whatever their length."""

import pytest

import thread_transport
from pflmpi.transports.text import from_root, gather_texts


def test_texts_of_any_length_reach_rank_0():
    texts = ["ä" * 5000, "", "x"]
    assert thread_transport.run_ranks(3, lambda one: gather_texts(one, texts[one.rank])) == [
        texts,
        None,
        None,
    ]


@pytest.mark.parametrize("text", ["ä" * 5000, "", "x"])
def test_rank_0s_text_of_any_length_reaches_all(text):
    texts = [text, "another", ""]
    assert thread_transport.run_ranks(3, lambda one: from_root(one, texts[one.rank])) == [text] * 3

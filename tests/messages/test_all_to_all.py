import numpy as np
import pytest

from pflmpi.messages.all_to_all import AllToAll


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_what_a_rank_sends_and_receives_is_a_row_and_a_column_of_the_table_of_all_pairs(
    ranks: int, products: int
) -> None:
    random = np.random.default_rng(ranks)
    factors = [tuple(random.integers(0, 3, (2, ranks))) for _ in range(products)]
    table = sum(np.outer(senders, receivers) for senders, receivers in factors)
    found, away = AllToAll(tuple(factors)), table - np.diag(np.diag(table))
    for rank in range(ranks):
        assert found.sent_by(rank) == {other: size for other, size in enumerate(table[rank]) if size}
        assert found.received_by(rank) == {other: size for other, size in enumerate(table[:, rank]) if size}
    assert found.sent.tolist() == away.sum(1).tolist() and found.received.tolist() == away.sum(0).tolist()
    assert found.moved == away.sum()
    assert found.call(answers=True).sizes == tuple(away.sum(1)) and found.call(answers=True).answers

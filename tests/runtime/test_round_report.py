"""What rank 0 hears of all ranks at the end of a round."""

import numpy as np

from pflmpi.messages.groups import ClientGroup
from pflmpi.runtime import round_report
from pflmpi.runtime.measures import Counts
from thread_transport import run_ranks

SECONDS = [(0.0, 0.0), (3.0, 1.0), (1.0, 1.0)]  # of training and of testing
GROUPS: list[list[ClientGroup]] = [[], [np.array([0])], [np.array([1])]]  # rank 0 serves and does not compute


def test_waiting_and_testing_are_means_of_the_ranks_that_compute():
    totals = np.full((2, 2), 3, np.int64)

    def work(transport):
        mine = GROUPS[transport.rank]
        tested = Counts.none(totals[: len(mine)])
        losses = {int(group[0]): 0.5 for group in mine}
        found = round_report.Measured(tested, losses, *SECONDS[transport.rank], (float(transport.rank), 1.0))
        return round_report.gather(transport, GROUPS, GROUPS, totals, 2, found)

    heard, *others = run_ranks(3, work)
    assert heard is not None and others == [None, None]
    assert (heard.busiest, heard.waiting, heard.testing) == (4.0, 1.0, 1.0)
    assert heard.train_loss.tolist() == [0.5, 0.5]
    assert heard.stop.tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert len(heard.memory) == 3 and (heard.memory > 1 << 20).all(), "Linux says it"

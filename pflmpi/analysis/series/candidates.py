"""What FedFomo's clients make of the models that they are sent: their shares in each mix, and their worth so far."""

from collections.abc import Sequence

import numpy as np

from pflmpi.analysis.plots import Matrices, Missing, Panel
from pflmpi.analysis.run import Round
from pflmpi.analysis.series.fusion import NO_ROUND, trained
from pflmpi.analysis.server_leaves import server_leaf

_NOBODY = -1  # instead of an id, where a client was sent fewer models than it could be


def shares(states: Sequence[Round]) -> Matrices | Missing:
    """Return whose models the participants of some rounds mixed in them, and with what shares."""
    title = "Shares in the mixed models"
    known = trained(states)
    if not known:
        return Missing(title, NO_ROUND)
    panels = tuple(panel for state in known if (panel := _panel(state)) is not None)
    if not panels:
        return Missing(title, "an earlier version wrote the run, whose clients did not keep what they mixed")
    return Matrices(
        name="mixing_shares",
        title=title,
        caption="The share of each model (column) in the mix with which a participant (row) began its training: of "
        "its own, on the diagonal, and of those that it was sent. A row sums to 1; 0 where a model did not lower the "
        "loss on held out samples, empty where it was not sent. Columns: the participants as in the rows, then others "
        "whose models one of them was sent.",
        row_label="client",
        column_label="model of",
        value_label="share",
        panels=panels,
        limits=(0.0, 1.0),
    )


def affinities(states: Sequence[Round]) -> Matrices | Missing:
    """Return the affinities P, which the server keeps, in some rounds."""
    panels = tuple(
        Panel(f"round {state.number}", affinity.astype(np.float64), range(len(affinity)), range(len(affinity)))
        for state in states
        if (affinity := server_leaf(state, "affinity")) is not None
    )
    if not panels:
        return Missing("Affinities", "no checkpoint of the run keeps the server's affinities")
    return Matrices(
        name="affinity",
        title="Affinities",
        caption="What another's model (column) has been worth to a client (row), added up over the rounds: the sum of "
        "its raw weights w. Positive: it lowered the loss on held out samples. The client's weight for its own model "
        "stays with it.",
        row_label="client",
        column_label="model of",
        value_label="affinity",
        panels=panels,
        hide_diagonal=True,
    )


def _panel(state: Round) -> Panel | None:
    """Return the shares of a round's participants, None where clients do not keep them.

    What a client keeps is from the last round that it took part in, and so is of this one for its participants alone.
    """
    if "mix/shares" not in state.clients:
        return None
    participants = np.sort(state.metrics["participants"])
    sent, values = (state.clients[f"mix/{name}"][participants] for name in ("clients", "shares"))
    mixed = np.column_stack([participants, sent])  # [P, 1 + M], as the shares
    others = np.setdiff1d(mixed, [*participants, _NOBODY])
    columns = [*participants.tolist(), *others.tolist()]
    matrix = np.full((len(participants), len(columns)), np.nan)
    for row, (clients, parts) in enumerate(zip(mixed.tolist(), values.tolist(), strict=True)):
        for client, share in zip(clients, parts, strict=True):
            if client != _NOBODY:
                matrix[row, columns.index(client)] = share
    return Panel(f"round {state.number}", matrix, participants.tolist(), columns)

"""Clients whose update fails: which, why, and whether a round can be without them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pflmpi import tree
from pflmpi.algorithms.base import Algorithm
from pflmpi.errors import AlgorithmError, ConfigError, RunError
from pflmpi.learning.task import Task
from pflmpi.messages.device_sum import on_host
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import Update
from pflmpi.runtime.faults import CollectiveError
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

# Faults of the machine: on other ranks, or later, there may be none, and results must not depend on that.
_MACHINE_ERRORS = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_LOSS = torch.empty(0, dtype=torch.float64)
_HOST_MEMORY_ERROR = "can't allocate memory"  # torch raises a plain RuntimeError for it
_REMEDY = "lower training.lr, or a proximal or head learning rate of the algorithm"


@dataclass(frozen=True)
class GroupUpdate:
    """The local updates of a group."""

    clients: ClientGroup  # [m] ascending ids of those that succeeded
    states: Tree  # tree of [m, ...], their new states; `{}` where m is 0
    up: Messages  # messages with a leading axis m, on the host or on the device; `{}` where m is 0
    loss: torch.Tensor  # [m] float64, their mean training loss
    failed: Mapping[int, str]  # of the others, why


def update_group(
    executor: Executor, clients: ClientGroup, states: Tree, down: Messages, round: int, skip: bool
) -> Callable[[], GroupUpdate]:
    """Begin to update the clients of a group; the result waits for it, and may raise too.

    An exception ends the call for the whole group; its clients are then computed one by one, to know whose it was.

    Args:
        skip: return the clients that fail; otherwise the first of them raises.

    Raises:
        AlgorithmError: a client's exception, or one that is no client's: of the contract, the machine, all together.
        RunError: a client's state or message is not finite.
    """
    try:
        done = executor.update(clients, states, down, round)
    except AlgorithmError as error:
        if not _is_client_error(error) or (len(clients) == 1 and not skip):
            raise
        if len(clients) == 1:
            return partial(GroupUpdate, clients[:0], {}, {}, _NO_LOSS, {int(clients[0]): str(error)})
        updates = [
            update_group(
                executor,
                clients[i : i + 1],
                _select_rows(states, [i]),
                as_messages(_select_rows({**down}, [i])),
                round,
                skip,
            )()
            for i in range(len(clients))
        ]
        if not any(alone.failed for alone in updates):
            raise
        return partial(_concatenate, updates)
    return lambda: _drop_diverged(clients, states, done(), round, skip)


def _drop_diverged(clients: ClientGroup, states: Tree, done: Update, round: int, skip: bool) -> GroupUpdate:
    """An update of clients with such states before, without those that have diverged."""
    if done.is_finite:
        return GroupUpdate(clients, done.states, done.up, done.loss, {})
    sent = on_host(done.up)
    failed = _find_diverged(clients, states, done.states, sent, round, "client_update")
    if failed and not skip:
        raise RunError(f"{next(iter(failed.values()))}; {_REMEDY}, or set runtime.client_errors to skip")
    if not failed:
        return GroupUpdate(clients, done.states, sent, done.loss, {})
    good = np.flatnonzero(~np.isin(clients, list(failed))).tolist()
    states, up = _select_rows(done.states, good), as_messages(_select_rows({**sent}, good))
    return GroupUpdate(clients[good], states, up, done.loss[good], failed)


def introduce_group(executor: Executor, clients: ClientGroup, states: Tree) -> Messages:
    """The introductions of the clients of a group; no run goes on without one of them.

    Raises:
        RunError: a message is not finite.
    """
    up = executor.introduce(clients, states)
    for why in _find_diverged(clients, {}, {}, up, 0, "introduce").values():
        raise RunError(why)
    return up


def agree_on_failed(transport: Transport, participants: np.ndarray, failed: Mapping[int, str]) -> dict[int, str]:
    """Participants that have failed on any rank, ascending; why is known on rank 0, and "" elsewhere."""
    failed_anywhere = transport.maximum(np.isin(participants, list(failed)).astype(np.float64))
    clients = participants[failed_anywhere > 0].tolist()
    if not clients:
        return {}
    texts = transport.gather_texts(json.dumps({**failed}))
    reasons = {int(client): why for text in texts or () for client, why in json.loads(text).items()}
    return {client: reasons.get(client, "") for client in clients}


def check_enough_left(algorithm: Algorithm, task: Task, round: int, left: int, failed: Mapping[int, str]) -> None:
    """Raise `CollectiveError` on all ranks if a round cannot go on with as many participants as are left."""
    first, count = next(iter(failed.values())), len(failed)
    if left == 0:
        raise CollectiveError(
            RunError(f"all {count} participants of round {round} failed, nobody is left; the first: {first}; {_REMEDY}")
        )
    try:
        algorithm.check(task, left)
    except ConfigError as error:
        why = f"{first}; without the {count} that failed in round {round}: {error}"
        raise CollectiveError(RunError(why)) from error


def _is_client_error(error: AlgorithmError) -> bool:
    """Whether a method of the algorithm raised, and would have done so on any machine."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, _MACHINE_ERRORS) and _HOST_MEMORY_ERROR not in str(cause)


def _find_diverged(
    clients: ClientGroup, before: Tree, after: Tree, up: Messages, round: int, stage: str
) -> dict[int, str]:
    """The clients with values that are not finite, in a message or, where they were finite before, in their state."""
    failed: dict[int, str] = {}
    sent: Tree = {**up}
    for what, values, old in (("message", sent, {}), ("state", after, dict(tree.leaves(before)))):
        for path, leaf in tree.leaves(values):
            if not leaf.is_floating_point() or leaf.sum().isfinite():  # a sum is finite only where all values are
                continue
            bad = ~leaf.isfinite() & old[path].isfinite() if path in old else ~leaf.isfinite()
            for client in clients[bad.reshape(len(leaf), -1).any(1).numpy()].tolist():
                why = f"round {round}: client {client} diverged in {stage} (values in its {what} {path} are not finite)"
                failed.setdefault(client, why)
    return failed


def _select_rows(value: Tree, positions: list[int]) -> Tree:
    def chosen(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.index_select(0, torch.tensor(positions, device=leaf.device))

    return tree.map(chosen, value) if positions else {}


def _concatenate(updates: list[GroupUpdate]) -> GroupUpdate:
    failed = {client: why for update in updates for client, why in update.failed.items()}
    good = [update for update in updates if len(update.clients)]
    if not good:
        return GroupUpdate(updates[0].clients[:0], {}, {}, _NO_LOSS, failed)

    def cat(trees: list[Tree]) -> Tree:
        return tree.map(lambda *leaves: torch.cat(leaves), trees[0], *trees[1:])

    clients = np.concatenate([update.clients for update in good])
    ups = as_messages(cat([{**on_host(update.up)} for update in good]))
    loss = torch.cat([update.loss for update in good])
    return GroupUpdate(clients, cat([update.states for update in good]), ups, loss, failed)

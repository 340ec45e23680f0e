"""Clients whose local update fails: finding them, and running the round without them."""

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
from pflmpi.messages.device_sum import messages_to_host
from pflmpi.messages.groups import ClientGroup
from pflmpi.messages.kinds import Messages, as_messages
from pflmpi.runtime.executors.base import Executor
from pflmpi.runtime.executors.transfers import Update
from pflmpi.runtime.faults import CollectiveError
from pflmpi.transports.base import Transport
from pflmpi.tree import Tree

# These depend on the machine, so no client may be skipped for them: results must not depend on ranks.
_MACHINE_ERRORS = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)
_NO_LOSS = torch.empty(0, dtype=torch.float64)
_HOST_MEMORY_ERROR = "can't allocate memory"  # torch raises a plain RuntimeError for it
_REMEDY = "lower training.lr, or a proximal or head learning rate of the algorithm"


@dataclass(frozen=True)
class GroupUpdate:
    """The local updates of a group."""

    clients: ClientGroup  # [m] ascending ids of the clients that succeeded
    states: Tree  # [m, ...], new states; `{}` where m is 0
    up: Messages  # [m, ...], on the host or on the device; `{}` where m is 0
    loss: torch.Tensor  # [m] float64, mean training loss
    failed: Mapping[int, str]  # why, by client that failed


def update_group(
    executor: Executor, clients: ClientGroup, states: Tree, down: Messages, round: int, skip: bool
) -> Callable[[], GroupUpdate]:
    """Starts the local updates of a group; call the result to wait for them, which may raise as well.

    If the call for the whole group raises, its clients are computed one by one to find out which of them failed.

    Args:
        skip: report failing clients in `GroupUpdate.failed`; otherwise the first one raises.

    Raises:
        AlgorithmError: a client's update raised; or the error is not a client's, such as a broken contract, lack of
            memory, or one that only occurs when the clients are computed together.
        RunError: a client's state or message is not finite.
    """
    try:
        wait = executor.update(clients, states, down, round)
    except AlgorithmError as error:
        if not _is_client_error(error) or (len(clients) == 1 and not skip):
            raise
        if len(clients) == 1:
            return partial(GroupUpdate, clients[:0], {}, {}, _NO_LOSS, {int(clients[0]): str(error)})
        updates = []
        for i in range(len(clients)):
            own_states, own_down = _select_rows(states, [i]), as_messages(_select_rows({**down}, [i]))
            updates.append(update_group(executor, clients[i : i + 1], own_states, own_down, round, skip)())
        if not any(update.failed for update in updates):
            raise
        return partial(_concatenate, updates)
    return lambda: _drop_diverged(clients, states, wait(), round, skip)


def _drop_diverged(clients: ClientGroup, before: Tree, update: Update, round: int, skip: bool) -> GroupUpdate:
    """Returns an update without the clients that diverged; `before` [m, ...] are their states before it."""
    if update.is_finite:
        return GroupUpdate(clients, update.states, update.up, update.loss, {})
    up = messages_to_host(update.up)
    failed = _find_diverged(clients, before, update.states, up, round, "client_update")
    if not failed:
        return GroupUpdate(clients, update.states, up, update.loss, {})
    if not skip:
        raise RunError(f"{next(iter(failed.values()))}; {_REMEDY}, or set runtime.client_errors to skip")
    good = np.flatnonzero(~np.isin(clients, list(failed))).tolist()
    states, up = _select_rows(update.states, good), as_messages(_select_rows({**up}, good))
    return GroupUpdate(clients[good], states, up, update.loss[good], failed)


def introduce_group(executor: Executor, clients: ClientGroup, states: Tree) -> Messages:
    """Returns the introductions of a group; unlike updates, none of them may fail.

    Raises:
        RunError: a message is not finite.
    """
    up = executor.introduce(clients, states)
    for why in _find_diverged(clients, {}, {}, up, 0, "introduce").values():
        raise RunError(why)
    return up


def agree_on_failed(transport: Transport, participants: np.ndarray, failed: Mapping[int, str]) -> dict[int, str]:
    """Returns the participants that failed on any rank, ascending; only rank 0 has the reasons, other ranks ""."""
    failed_anywhere = transport.maximum(np.isin(participants, list(failed)).astype(np.float64))
    clients = participants[failed_anywhere > 0].tolist()
    if not clients:
        return {}
    texts = transport.gather_texts(json.dumps({**failed}))
    reasons = {int(client): why for text in texts or () for client, why in json.loads(text).items()}
    return {client: reasons.get(client, "") for client in clients}


def check_enough_left(algorithm: Algorithm, task: Task, round: int, left: int, failed: Mapping[int, str]) -> None:
    """Raises `CollectiveError` on all ranks if the participants that are left are too few for the round."""
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
    """Whether the algorithm raised for reasons that do not depend on the machine."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, _MACHINE_ERRORS) and _HOST_MEMORY_ERROR not in str(cause)


def _find_diverged(
    clients: ClientGroup, before: Tree, after: Tree, up: Messages, round: int, stage: str
) -> dict[int, str]:
    """Returns the clients with non-finite values in a message, or in a state that was finite before."""
    failed: dict[int, str] = {}
    messages: Tree = {**up}
    for what, values, old in (("message", messages, {}), ("state", after, dict(tree.leaves(before)))):
        for path, leaf in tree.leaves(values):
            if not leaf.is_floating_point() or leaf.sum().isfinite():  # a sum is finite only where all values are
                continue
            bad = ~leaf.isfinite() & old[path].isfinite() if path in old else ~leaf.isfinite()
            for client in clients[bad.reshape(len(leaf), -1).any(1).numpy()].tolist():
                why = f"round {round}: client {client} diverged in {stage} (values in its {what} {path} are not finite)"
                failed.setdefault(client, why)
    return failed


def _select_rows(value: Tree, positions: list[int]) -> Tree:
    if not positions:
        return {}
    return tree.map(lambda leaf: leaf.index_select(0, torch.tensor(positions, device=leaf.device)), value)


def _concatenate(updates: list[GroupUpdate]) -> GroupUpdate:
    failed = {client: why for update in updates for client, why in update.failed.items()}
    good = [update for update in updates if len(update.clients)]
    if not good:
        return GroupUpdate(updates[0].clients[:0], {}, {}, _NO_LOSS, failed)

    def cat(trees: list[Tree]) -> Tree:
        return tree.map(lambda *leaves: torch.cat(leaves), trees[0], *trees[1:])

    clients = np.concatenate([update.clients for update in good])
    ups = as_messages(cat([{**messages_to_host(update.up)} for update in good]))
    loss = torch.cat([update.loss for update in good])
    return GroupUpdate(clients, cat([update.states for update in good]), ups, loss, failed)

"""Randomness is data: every draw comes from a stream named by its purpose, never from global state."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

_AT_ONCE = 4  # 64-bit numbers that Philox generates for each value of its counter


def stream(seed: int, round: int, client: int, purpose: str, skipped: int = 0) -> np.random.Generator:
    """Generator for one purpose, client and round, advanced by `skipped` numbers of `random`.

    The stream is counter-based (Philox) and depends only on its arguments: not on the rank, the order of calls, or the
    number of draws made elsewhere. Use `client=-1` for draws that concern all clients.

    >>> int(stream(0, 3, 7, "batches").integers(1000)) == int(stream(0, 3, 7, "batches").integers(1000))
    True
    >>> bool(stream(0, 3, 7, "batches", 5).random() == stream(0, 3, 7, "batches").random(6)[5])
    True
    """
    key = int.from_bytes(_key(seed, round, client, purpose), "little")
    generator = np.random.Generator(np.random.Philox(key=key, counter=skipped // _AT_ONCE))
    generator.random(skipped % _AT_ONCE)
    return generator


def streams(seed: int, round: int, clients: Iterable[int], purpose: str) -> Iterator[np.random.Generator]:
    """Yield the `stream` of each client, fast for very many: it is one generator, which the next step resets.

    >>> [int(rng.integers(1000)) for rng in streams(0, 3, [7, 8], "batches")] == [
    ...     int(stream(0, 3, client, "batches").integers(1000)) for client in (7, 8)
    ... ]
    True
    """
    philox = np.random.Philox(key=0)
    generator, start = np.random.Generator(philox), philox.state
    for client in clients:
        start["state"]["key"] = np.frombuffer(_key(seed, round, client, purpose), "<u8")
        philox.state = start
        yield generator


def _key(seed: int, round: int, client: int, purpose: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{round}/{client}/{purpose}".encode(), digest_size=16).digest()

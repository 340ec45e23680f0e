"""Randomness is data: every draw comes from a stream named by its purpose, never from global state."""

import hashlib

import numpy as np

_AT_ONCE = 4  # numbers of 64 bits that Philox makes of one value of its counter


def stream(seed: int, round: int, client: int, purpose: str, skipped: int = 0) -> np.random.Generator:
    """Generator for one purpose, client and round, after so many numbers of `random`.

    The stream is counter-based (Philox) and depends only on its arguments: not on the rank, the order of calls, or the
    number of draws made elsewhere. Use `client=-1` for what concerns all clients.

    >>> int(stream(0, 3, 7, "batches").integers(1000)) == int(stream(0, 3, 7, "batches").integers(1000))
    True
    >>> bool(stream(0, 3, 7, "batches", 5).random() == stream(0, 3, 7, "batches").random(6)[5])
    True
    """
    name = f"{seed}/{round}/{client}/{purpose}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key, counter=skipped // _AT_ONCE))
    generator.random(skipped % _AT_ONCE)
    return generator

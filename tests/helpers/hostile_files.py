"""A run of a stranger's, with a file in it that would have a reader hang, follow it elsewhere, or fill the memory.

What is crafted has the checksums of a good run: whoever can write a file can compute those too.
"""

import os
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py as _h5py
import numpy as np
from zlib_ng import zlib_ng as zlib

from described import about, restate, stamp

h5py: Any = _h5py
ESC = "\x1b]0;owned\x07\x1b[31m"
SHARD = "shards/round_00002_rank_000.h5"
ROUND = "round_00002.h5"
_HEAD = 512
_3_GB, _36_TIB = 3 << 30, 36 << 40

Hostile = Callable[[Path, Path], None]  # of the run, and of the folder of what is none of its business


def secrets(outside):
    """What no command may open: a FIFO, and files with something in them."""
    outside.mkdir()
    os.mkfifo(outside / "fifo")
    (outside / "secret.txt").write_text("round,secret\n1,2\n")
    with h5py.File(outside / "secret.h5", "w") as file:
        file["x"] = np.arange(12.0, dtype=np.float32)
    (outside / "folder").mkdir()


def fifo(path, outside):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path, outside):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def link_out(path, outside):
    content = path.read_bytes() if path.exists() else b"x"
    (outside / path.name).write_bytes(content)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / path.name)


def link_to_fifo(path, outside):
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "fifo")


def folder(path, outside):
    path.unlink(missing_ok=True)
    path.mkdir()


def sparse(path, outside):
    """As long as a file system allows, and almost nothing of it stored."""
    if path.suffix == ".h5":
        path.write_bytes((b"pflmpi bytes=%d crc32=00000000\n" % (_SPARSE - _HEAD)).ljust(_HEAD, b"\0"))
    os.truncate(path, _SPARSE)


_SPARSE = 15 << 40  # ext4 has files of up to 16 TiB
KINDS = (fifo, endless, link_out, link_to_fifo, folder, sparse)
PLACES = (*("config.yaml", "metrics.csv", "partition.csv", "lock.json"), *(ROUND, SHARD, "probe_00002.h5"))


def in_place(kind, place):
    def put(run, outside):
        if not (run / place).exists() and kind is sparse:
            (run / place).write_bytes(b"")
        kind(run / place, outside)

    return put


def folder_out(run, outside):
    """The folder of the shards is elsewhere."""
    (run / "shards").rename(outside / "shards")
    (run / "shards").symlink_to(outside / "shards")


def crafted(place, change):
    def put(run, outside):
        with h5py.File(run / place, "r+") as file:
            change(file, outside)
        seal(run, place)

    return put


def seal(run, place):
    """Give a file the checksums that its content has, and those of a shard to the round files."""
    seal_file(run / place)
    if not place.startswith("shards/"):
        return
    head = (run / place).read_bytes()[:60]
    for path in sorted(run.glob("round_*.h5")):
        with h5py.File(path, "r+") as file:
            description = about(file)
            if place in description["shards"]:
                length, checksum = head.split(b"bytes=")[1].split()[0], head.split(b"crc32=")[1][:8]
                description["shards"][place] = [int(length), int(checksum, 16)]
                restate(file, description)
        seal_file(path)


def seal_file(path):
    content = path.read_bytes()[_HEAD:]
    head = b"pflmpi bytes=%d crc32=%08x\n" % (len(content), zlib.crc32(content))
    path.write_bytes(head.ljust(_HEAD, b"\0") + content)


def _array(file, group):
    """The path of the first array below a group."""
    names: list[str] = []
    file[group].visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return f"{group}/{names[0]}"


def external_link(group, to):
    def change(file, outside):
        path = _array(file, group)
        del file[path]
        file[path] = h5py.ExternalLink(str(outside / to), "/x")

    return change


def external_group(group, to):
    def change(file, outside):
        del file[group]
        file[group] = h5py.ExternalLink(str(outside / to), "/")

    return change


def external_storage(group, to):
    def change(file, outside):
        path = _array(file, group)
        before = file[path]
        shape, dtype = before.shape, before.dtype
        del file[path]
        length = max(before.size if before else 1, 1) * dtype.itemsize
        file.create_dataset(path, shape or (1,), dtype, external=[(str(outside / to), 0, length)])

    return change


def virtual(group, to, growing=False):
    def change(file, outside):
        path = _array(file, group)
        shape = tuple(file[path].shape) or (1,)
        del file[path]
        most = (None, *shape[1:]) if growing else shape
        layout = h5py.VirtualLayout(shape, "f4", maxshape=most)
        name = to if to.startswith((".", "/", "shards")) else str(outside / to)
        source = h5py.VirtualSource(name, "x", shape, "f4", maxshape=most)
        if growing:
            layout[0 : h5py.h5s.UNLIMITED] = source[0 : h5py.h5s.UNLIMITED]
        else:
            layout[...] = source
        stamp(file.create_virtual_dataset(path, layout), 0)

    return change


def declared(group, size):
    """An array of which nothing is stored, with the checksum of what it shows: zeros."""

    def change(file, outside):
        path = _array(file, group)
        dtype = file[path].dtype
        rest = tuple(file[path].shape[1:])
        del file[path]
        row = int(np.prod(rest, dtype=np.int64)) * dtype.itemsize
        stamp(file.create_dataset(path, (size // row, *rest), dtype), _zeros(size))

    return change


@cache
def _zeros(size):
    if size > _3_GB:
        return 0
    block, checksum = bytes(1 << 24), 0
    for _ in range(size >> 24):
        checksum = zlib.crc32(block, checksum)
    return checksum


def packed(group):
    """Chunks that unpack to more than any memory has, by two rounds of compression."""

    def change(file, outside):
        path = _array(file, group)
        del file[path]
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((1 << 28,))
        for _ in range(2):
            creation.set_deflate(9)
        space = h5py.h5s.create_simple((1 << 28,))
        made = h5py.h5d.create(file.id, path.encode(), h5py.h5t.NATIVE_FLOAT, space, creation)
        inner = zlib.compress(zlib.compress(bytes(1 << 20), 9), 9)
        made.write_direct_chunk((0,), inner)
        stamp(h5py.Dataset(made), 0)

    return change


def doubling(file, outside):
    """2^60 paths to one array."""
    group = file.create_group("server/many")
    group["x"] = np.zeros(3, np.float32)
    stamp(group["x"])
    for depth in range(60):
        above = file.create_group(f"server/m{depth}")
        above["a"] = above["b"] = group
        group = above


def circle(file, outside):
    file["server/round"] = file["server"]


def soft_circle(file, outside):
    file["server/round"] = h5py.SoftLink("/server")


def escaping_name(group):
    def change(file, outside):
        file[f"{group}/{ESC}"] = np.zeros(3, np.float32)
        stamp(file[f"{group}/{ESC}"])

    return change


def references(file, outside):
    """Texts of any length, which are no arrays."""
    made = file.create_dataset("server/texts", (3,), h5py.string_dtype())
    made[:] = "x" * 99
    stamp(made, 0)


def shard_names(name):
    def change(file, outside):
        restate(file, about(file) | {"shards": {name.replace("OUT", str(outside)): [0, 0]}})
        for column in ("file", "row"):
            file[f"layout/{column}"][...] = 0
            stamp(file[f"layout/{column}"])

    return change


def far_clients(file, outside):
    """Cohorts that are not there."""
    file["layout/cohort"][-1] = 1 << 60
    stamp(file["layout/cohort"])


def wrong_rows(file, outside):
    file["layout/file"][...] = 7
    stamp(file["layout/file"])


CONTENT = {
    **{
        f"{name} of {group}, to {to}": crafted(ROUND, change(group, to))
        for name, change in (("link", external_link), ("storage", external_storage), ("virtual", virtual))
        for group in ("server", "clients", "layout", "metrics")
        for to in ("fifo", "secret.h5")
    },
    **{
        f"{name} of rows, to {to}": crafted(SHARD, change("cohort0/rows", to))
        for name, change in (("link", external_link), ("storage", external_storage), ("virtual", virtual))
        for to in ("fifo", "secret.h5")
    },
    **{f"section {name} elsewhere": crafted(ROUND, external_group(name, "fifo")) for name in ("server", "layout")},
    "cohort elsewhere": crafted(SHARD, external_group("cohort0", "fifo")),
    "growing virtual clients": crafted(ROUND, virtual("clients", "fifo", growing=True)),
    "virtual clients up": crafted(ROUND, virtual("clients", "../outside/secret.h5")),
    "virtual clients below shards": crafted(ROUND, virtual("clients", "shards/../../outside/secret.h5")),
    "3 GB of server": crafted(ROUND, declared("server", _3_GB)),
    "3 GB of metrics": crafted(ROUND, declared("metrics", _3_GB)),
    "3 GB of rows": crafted(SHARD, declared("cohort0/rows", _3_GB)),
    "36 TiB of server": crafted(ROUND, declared("server", _36_TIB)),
    "36 TiB of layout": crafted(ROUND, declared("layout", _36_TIB)),
    "36 TiB of clients": crafted(ROUND, declared("clients", _36_TIB)),
    "36 TiB of rows": crafted(SHARD, declared("cohort0/rows", _36_TIB)),
    "packed twice": crafted(ROUND, packed("server")),
    "doubling groups": crafted(ROUND, doubling),
    "a circle": crafted(ROUND, circle),
    "a soft circle": crafted(ROUND, soft_circle),
    "no array": crafted(ROUND, references),
    "a shard up": crafted(ROUND, shard_names("../outside/secret.h5")),
    "a shard elsewhere": crafted(ROUND, shard_names("OUT/secret.h5")),
    "a shard of another name": crafted(ROUND, shard_names("shards/../config.yaml")),
    "far clients": crafted(ROUND, far_clients),
    "rows of no file": crafted(ROUND, wrong_rows),
}


def _h5_data(change):
    def make(folder, outside):
        with h5py.File(folder / "own.h5", "w") as file:
            file["y"] = np.arange(12) % 2
            change(file, outside)
        return folder / "own.h5"

    return make


def _link(to):
    def change(file, outside):
        file["x"] = h5py.ExternalLink(str(outside / to), "/x")

    return change


def _storage(file, outside):
    file.create_dataset("x", (12, 1), "f4", external=[(str(outside / "secret.h5"), 0, 48)])


def _virtual(file, outside):
    layout = h5py.VirtualLayout((12,), "f4")
    layout[...] = h5py.VirtualSource(str(outside / "secret.h5"), "x", (12,), "f4")
    file.create_virtual_dataset("x", layout)


def _bomb(folder, outside):
    """8 MB that unpack to 1.8 GB, which is more than a command may take."""
    with zipfile.ZipFile(folder / "own.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        _zeros_member(archive, "x.npy", (450_000, 1000))
        with archive.open("y.npy", "w") as member:
            np.lib.format.write_array(member, np.arange(450_000) % 2)
    return folder / "own.npz"


def _pfllib_bomb(folder, outside):
    (folder / "own/train").mkdir(parents=True)
    with zipfile.ZipFile(folder / "own/train/0.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        _zeros_member(archive, "data.npy", (450_000, 1000))
    return folder / "own"


def _zeros_member(archive, name, shape):
    with archive.open(name, "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
        block = bytes(1 << 24)
        left = 4 * int(np.prod(shape))
        while left:
            left -= member.write(block[:left])


def _never_ends(folder, outside):
    (folder / "own.csv").symlink_to("/dev/zero")
    return folder / "own.csv"


DATA: dict[str, Callable[[Path, Path], Path]] = {
    "link to a FIFO": _h5_data(_link("fifo")),
    "link to a file": _h5_data(_link("secret.h5")),
    "external storage": _h5_data(_storage),
    "virtual": _h5_data(_virtual),
    "3 GB declared": _h5_data(lambda file, outside: file.create_dataset("x", (12, 1 << 26), "f4") and None),
    "36 TiB declared": _h5_data(lambda file, outside: file.create_dataset("x", (12, 3 << 38), "f4") and None),
    "an .npz that unpacks to 1.8 GB": _bomb,
    "a client of PFLlib that unpacks to 1.8 GB": _pfllib_bomb,
    "a table without an end": _never_ends,
}

"""Small data files in the formats that datasets are published in, and comparing what is read from them."""

import gzip
import hashlib
import json
import pickle

import numpy as np
import torchvision

from pflmpi.data import SOURCES
from pflmpi.data.dataset import assemble

NUM_CLASSES = {"digits": 10, "mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100} | {
    "emnist": 62,
    "femnist": 62,
}
SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}


def random_samples(seed, count, name):
    """Return images uint8 [count, C, H, W] and labels [count] like those of a source."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *SHAPES.get(name, (1, 28, 28))), dtype=np.uint8)
    return images, rng.integers(0, NUM_CLASSES[name], count)


def idx_bytes(array):
    """Return an array of bytes in the idx format: magic number, big-endian sizes, data."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_idx(raw, name, packed):
    raw.mkdir(parents=True)
    for part, seed, count in zip(SOURCES[name].parts, (1, 2), (30, 10), strict=True):
        images, labels = random_samples(seed, count, name)
        for kind, array in (("images-idx3", images[:, 0]), ("labels-idx1", labels.astype(np.uint8))):
            content = idx_bytes(array)
            path = raw / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


def write_cifar(root, name, monkeypatch):
    """Write pickles as in the published archives, and tell torchvision their checksums."""
    source = SOURCES[name]
    folder = root / source.folder
    folder.mkdir(parents=True)
    *batches, test, meta = source.parts
    key, names = ("labels", "label_names") if name == "cifar10" else ("fine_labels", "fine_label_names")
    for seed, part in enumerate([*batches, test]):
        images, labels = random_samples(seed, 6, name)
        content = {"data": images.reshape(6, -1), key: labels.tolist()}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    (folder / meta).write_bytes(pickle.dumps({names: [str(i) for i in range(NUM_CLASSES[name])]}, protocol=2))
    sums = {part: hashlib.md5((folder / part).read_bytes()).hexdigest() for part in source.parts}
    reader = getattr(torchvision.datasets, source.reader)
    monkeypatch.setattr(reader, "train_list", [[part, sums[part]] for part in batches])
    monkeypatch.setattr(reader, "test_list", [[test, sums[test]]])
    monkeypatch.setattr(reader, "meta", {"filename": meta, "key": names, "md5": sums[meta]})


def leaf_samples():
    """Return part -> writer -> (images, labels); `f0099` has test samples only."""
    writers = {"train": ["f0001", "f0002", "f0003"], "test": ["f0001", "f0003", "f0099"]}
    return {
        part: {user: random_samples(10 * len(part) + i, 4 + i, "femnist") for i, user in enumerate(users)}
        for part, users in writers.items()
    }


def write_leaf(folder):
    for part, users in leaf_samples().items():
        (folder / part).mkdir(parents=True)
        # Two files for a part, as LEAF makes them.
        for number, names in enumerate((list(users)[:2], list(users)[2:])):
            data = {
                user: {"x": (users[user][0].reshape(-1, 784) / 255).tolist(), "y": users[user][1].tolist()}
                for user in names
            }
            content = {"users": names, "num_samples": [len(users[user][1]) for user in names], "user_data": data}
            (folder / part / f"all_data_{number}.json").write_text(json.dumps(content))


def write_leaf_texts(folder, length=4, **sides):
    """Write texts as LEAF writes Shakespeare: of each user `length` characters, and the next one as label."""
    for side, texts in sides.items():
        (folder / side).mkdir(parents=True)
        data = {}
        for user, text in texts.items():
            begins = range(len(text) - length)
            data[user] = {"x": [text[i : i + length] for i in begins], "y": [text[i + length] for i in begins]}
        content = {"users": [*texts], "num_samples": [len(user["y"]) for user in data.values()], "user_data": data}
        (folder / side / "all_data.json").write_text(json.dumps(content))


def write_sample(folder):
    """Write the one-file form of the same samples."""
    rows = [(part, user, *xy) for part, users in leaf_samples().items() for user, xy in users.items()]
    names = sorted({user for _, user, _, _ in rows})
    folder.mkdir(parents=True)
    np.savez(
        folder / "femnist-sample.npz",
        images=np.concatenate([x[:, 0] for _, _, x, _ in rows]),
        labels=np.concatenate([y for *_, y in rows]).astype(np.uint8),
        writer=np.concatenate([np.full(len(y), names.index(user)) for _, user, _, y in rows]).astype(np.uint16),
        test=np.concatenate([np.full(len(y), part == "test") for part, _, _, y in rows]),
        writers=np.array(names),
    )


def alike(a, b):
    same = all(np.array_equal(getattr(a, key), getattr(b, key)) for key in ("images", "labels", "official_test"))
    writers = (a.writers is None and b.writers is None) or np.array_equal(a.writers, b.writers)
    return bool(same and writers and a.digest == b.digest)


def toy(sizes, test_sizes):
    """Return a dataset with that many training and test samples of each class; image values are sample numbers."""
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in (sizes, test_sizes)])
    images = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return assemble("toy", images, labels, np.arange(len(labels)) >= sum(sizes), len(sizes), np.arange(len(labels)))

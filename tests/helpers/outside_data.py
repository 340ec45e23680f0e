"""Data of every kind that `data.path` takes, small."""

import json
import runpy

import h5py
import numpy as np
from PIL import Image


def write(folder):
    """table.npz, bytes.h5, pictures/, divided/ as PFLlib writes it, and text.npz by the example, which is there."""
    rng = np.random.default_rng(0)
    x, who = rng.normal(3, 2, (240, 4)), np.arange(240) % 5
    np.savez(folder / "table.npz", x=x, y=(x[:, 0] > x[:, 1]).astype(int), client=[f"site {client}" for client in who])
    with h5py.File(folder / "bytes.h5", "w") as file:
        y = np.arange(240) % 4
        file["x"], file["y"] = (rng.integers(0, 99, (240, 6, 6)) + 40 * y[:, None, None]).astype(np.uint8), y
    _pictures(folder / "pictures", rng)
    _divided(folder / "divided", rng)
    text = runpy.run_path(str(folder / "examples" / "text.py"))
    text["write"](folder / "text.npz", text["texts"](), every=40)


def _pictures(folder, rng):
    """A folder of pictures for each class, below train/ and test/."""
    for side, count in (("train", 12), ("test", 6)):
        for label, kind in enumerate(("cat", "dog", "owl")):
            (folder / side / kind).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 120, (40, 40, 3)) + 60 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / side / kind / f"{number}.png")


def _divided(folder, rng):
    """Files of each client below train/ and test/, with pickles in them."""
    for side, count in (("train", 24), ("test", 8)):
        (folder / side).mkdir(parents=True)
        for client in range(4):
            y = np.arange(count) % 3
            data = {"x": rng.normal(y[:, None, None, None], 1, (count, 1, 5, 5)).astype(np.float32), "y": y}
            np.savez_compressed(folder / side / f"{client}.npz", data=data)
    (folder / "config.json").write_text(json.dumps({"num_clients": 4, "num_classes": 3}))

"""Show what was understood of a file or folder of data: shapes, classes, clients, ranges."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("path", type=Path, help="an .npz, .h5 or .csv file, or a folder, as for data.path")
    parser.add_argument("--label", metavar="COLUMN", help="column of the labels in a .csv, as data.label")
    parser.add_argument("--client", metavar="COLUMN", help="column of the clients in a .csv, as data.client")


def run(options: argparse.Namespace) -> int:
    """Print a line for each; return the exit code."""
    import numpy as np

    from pflmpi.data.own_files import read_own
    from pflmpi.text import size

    found = read_own(options.path, options.label, options.client)
    x = found.images
    what = "bytes, images C x H x W" if x.dtype == np.uint8 else "numbers"
    classes, counts = np.unique(found.labels, return_counts=True)
    print(f"samples  {len(x)}, {size(x.nbytes)}")
    print(f"shape    {' x '.join(map(str, x.shape[1:]))} ({what})")
    print(f"values   {x.min():g} to {x.max():g}, mean {x.mean(dtype=np.float64):.4g}")
    print(f"classes  {len(classes)}, {counts.min()} to {counts.max()} samples each")
    print(f"test     {int(found.official_test.sum())} samples are marked as test (data.split: official)")
    if found.writers is None:
        print("clients  not in the data; choose a partition")
    else:
        each = np.bincount(found.writers)
        print(f"clients  {len(each)}, {each.min()} to {each.max()} samples each; use partition: {{name: writers}}")
    return 0

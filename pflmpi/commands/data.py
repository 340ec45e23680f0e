"""Show what was understood of a file or folder of data: shapes, classes, clients, ranges."""

import argparse
from pathlib import Path

from pflmpi.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("path", type=Path, help="an .npz, .h5 or .csv file, or a folder, as for data.path")
    parser.add_argument("--label", metavar="COLUMN", help="column of the labels in a .csv, as data.label")
    parser.add_argument("--client", metavar="COLUMN", help="column of the clients in a .csv, as data.client")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw samples of each class, and who holds how many of which"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for each; return the exit code."""
    import numpy as np

    from pflmpi.data.dataset import standardised
    from pflmpi.data.own_files import read_own
    from pflmpi.text import figures, size

    if options.picture is not None and options.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {options.picture}: expected a name that ends with .png or .svg")
    found = read_own(options.path, options.label, options.client)
    x = found.images
    what = "bytes, images C x H x W" if x.dtype == np.uint8 else "numbers"
    classes, counts = np.unique(found.labels, return_counts=True)
    print(f"samples  {len(x)}, {size(x.nbytes)}")
    print(f"shape    {' x '.join(map(str, x.shape[1:]))} ({what})")
    print(f"values   {x.min():g} to {x.max():g}, mean {x.mean(dtype=np.float64):.4g}")
    standard = standardised(found)
    print(f"standard mean {figures(standard.mean)}, deviation {figures(standard.std)} (data.normalize: standard)")
    print(f"classes  {len(classes)}, {counts.min()} to {counts.max()} samples each")
    print(f"test     {int(found.official_test.sum())} samples are marked as test (data.split: official)")
    if found.writers is None:
        print("clients  not in the data; choose a partition")
    else:
        each = np.bincount(found.writers)
        print(f"clients  {len(each)}, {each.min()} to {each.max()} samples each; use partition: {{name: writers}}")
    if options.picture is not None:
        from pflmpi.analysis.drawing.samples import draw_samples

        try:
            draw_samples(found, options.picture)
        except OSError as error:
            raise ConfigError(f"cannot write {options.picture}: {error.strerror}; choose another --picture") from error
        print(f"picture  {options.picture}")
    return 0

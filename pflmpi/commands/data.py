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
        "--layout", choices=("nchw", "nhwc"), help="axes of an array of images, channels first or last, as data.layout"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw samples of each class, and who holds how many of which"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line for each; return the exit code."""
    import numpy as np

    from pflmpi.data.dataset import standardised, unscaled
    from pflmpi.data.own_files import read_own
    from pflmpi.text import figures, size, some

    if options.picture is not None and options.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {options.picture}: expected a name that ends with .png or .svg")
    found = read_own(options.path, options.label, options.client, options.layout)
    x = found.images
    what = f"{'bytes' if x.dtype == np.uint8 else 'numbers'}{', images C x H x W' if x.ndim == 4 else ''}"
    classes, counts = np.unique(found.labels, return_counts=True)
    print(f"samples  {len(x)}, {size(x.nbytes)}")
    print(f"shape    {' x '.join(map(str, x.shape[1:]))} ({what})")
    if found.columns:
        print(f"columns  {some(found.columns, 8)}")
    print(f"values   {x.min():g} to {x.max():g}, mean {x.mean(dtype=np.float64):.4g}")
    standard = standardised(found)
    print(f"standard mean {figures(standard.mean)}, deviation {figures(standard.std)} (data.normalize: standard)")
    if problem := unscaled(found):
        print(f"scale    {problem}")
    names = [(found.class_names or found.written_labels)[label] for label in classes]
    print(f"classes  {len(classes)} ({some(names)}), {counts.min()} to {counts.max()} samples each")
    if len(untrained := np.setdiff1d(classes, found.labels[~found.official_test])):
        print(f"         only in samples marked as test: {some([found.written_labels[label] for label in untrained])}")
    print(
        f"test     {int(found.official_test.sum())} samples are marked as test, and not trained on (data.split: auto)"
    )
    if found.writers is None:
        print("clients  not in the data; choose a partition")
    else:
        each = np.bincount(found.writers)
        print(f"clients  {len(each)}, {each.min()} to {each.max()} samples each; use partition: {{name: writers}}")
        if found.written_clients != tuple(map(str, range(len(each)))):
            print(f"         numbered from 0: {some(found.written_clients)}")
    if options.picture is not None:
        from pflmpi.analysis.drawing.samples import draw_samples

        try:
            draw_samples(found, options.picture)
        except OSError as error:
            raise ConfigError(f"cannot write {options.picture}: {error.strerror}; choose another --picture") from error
        print(f"picture  {options.picture}")
    return 0

"""Show what was understood of a file of data, or which client of a configuration holds what."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError

if TYPE_CHECKING:
    from pflmpi.data.dataset import Dataset

_OF_A_CONFIG = {"overrides": "-s", "save": "--save"}
_OF_DATA = {"label": "--label", "client": "--client", "layout": "--layout", "picture": "--picture"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the command-line arguments."""
    parser.add_argument(
        "path", type=Path, help="an .npz, .h5 or .csv file or a folder, as for data.path; or a configuration (.yaml)"
    )
    parser.add_argument("--label", metavar="COLUMN", help="column of the labels in a .csv, as data.label")
    parser.add_argument("--client", metavar="COLUMN", help="column of the clients in a .csv, as data.client")
    parser.add_argument(
        "--layout", choices=("nchw", "nhwc"), help="axes of an array of images, channels first or last, as data.layout"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw samples of each class, and who holds how many of which"
    )
    arguments.add_overrides(parser)
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the configuration's partition, for `partition: {path: FILE}`"
    )
    arguments.add_force(parser)


def run(options: argparse.Namespace) -> int:
    """Show the data, or the partition of a configuration; return the exit code."""
    of_a_config = options.path.suffix in (".yaml", ".yml")
    for name, option in (_OF_DATA if of_a_config else _OF_A_CONFIG).items():
        if getattr(options, name):
            kinds = "data", "a configuration"
            wanted, given = kinds if of_a_config else reversed(kinds)
            raise ConfigError(f"{option} is for {wanted}, and {options.path} is {given}; leave it out")
    return _show_partition(options) if of_a_config else _show_data(options)


def _show_partition(options: argparse.Namespace) -> int:
    """Show which client holds what, and save that if asked."""
    from pflmpi.config.load import load
    from pflmpi.data.federation import save
    from pflmpi.data.picture import picture
    from pflmpi.experiment.build import load_federation
    from pflmpi.terminal import console

    arguments.check_free(options.save, "--save", options.force)
    federation = load_federation(load(options.path, options.overrides))
    terminal = console()
    terminal.print(picture(federation, terminal.width))
    if options.save is not None:
        save(federation, options.save)
        terminal.print(f"saved: partition: {{path: {options.save}}}")
    return 0


def _show_data(options: argparse.Namespace) -> int:
    """Show what was understood, and draw it if asked."""
    from pflmpi.data.own_files import read_own

    arguments.check_output(options.picture, "--picture", force=True)
    if options.picture is not None and options.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {options.picture}: expected a name that ends with .png or .svg")
    dataset = read_own(options.path, options.label, options.client, options.layout)
    print("\n".join(_lines(dataset)))
    if options.picture is not None:
        from pflmpi.analysis.drawing.samples import draw_samples

        with atomic.refusing(options.picture, "choose another --picture"):
            draw_samples(dataset, options.picture)
        print(f"picture  {options.picture}")
    return 0


def _lines(dataset: "Dataset") -> Iterator[str]:
    """Yield lines with shapes, values, classes and clients."""
    import numpy as np

    from pflmpi.data.dataset import standardised, unscaled
    from pflmpi.text import format_numbers, size, some

    x = dataset.images
    what = f"{'bytes' if x.dtype == np.uint8 else 'numbers'}{', images C x H x W' if x.ndim == 4 else ''}"
    yield f"samples  {len(x)}, {size(x.nbytes)}"
    yield f"shape    {' x '.join(map(str, x.shape[1:]))} ({what})"
    if dataset.columns:
        yield f"columns  {some(dataset.columns, 8)}"
    yield f"values   {x.min():g} to {x.max():g}, mean {x.mean(dtype=np.float64):.4g}"
    standard = standardised(dataset)
    mean, std = format_numbers(standard.mean), format_numbers(standard.std)
    yield f"standard mean {mean}, deviation {std} (data.normalize: standard)"
    if problem := unscaled(dataset):
        yield f"scale    {problem}"
    classes, counts = np.unique(dataset.labels, return_counts=True)
    names = [(dataset.class_names or dataset.written_labels)[label] for label in classes]
    yield f"classes  {len(classes)} ({some(names)}), {counts.min()} to {counts.max()} samples each"
    if len(untrained := np.setdiff1d(classes, dataset.labels[~dataset.official_test])):
        yield f"         only in samples marked as test: {some([dataset.written_labels[label] for label in untrained])}"
    marked = int(dataset.official_test.sum())
    yield f"test     {marked} samples are marked as test, and not trained on (data.split: auto)"
    if dataset.writers is None:
        yield "clients  not in the data; choose a partition"
        return
    sizes = np.bincount(dataset.writers)
    yield f"clients  {len(sizes)}, {sizes.min()} to {sizes.max()} samples each; use partition: {{name: writers}}"
    if dataset.written_clients != tuple(map(str, range(len(sizes)))):
        yield f"         numbered from 0: {some(dataset.written_clients)}"

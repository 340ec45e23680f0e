"""Show what was understood of a file of data, or which client of a configuration holds what.

pflmpi data patients.csv --label ill --client hospital --picture patients.png
pflmpi data configs/quickstart.yaml --save partition.npz
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError
from pflmpi.terminal import print_json
from pflmpi.text import format_bytes, format_numbers, join_truncated, pluralize

if TYPE_CHECKING:
    from pflmpi.data.dataset import Dataset
    from pflmpi.data.federation import Federation

_OPTIONS_OF_CONFIG = {"overrides": "-s", "save": "--save"}
_OPTIONS_OF_DATA = {
    "label": "--label",
    "task": "--task",
    "client": "--client",
    "layout": "--layout",
    "picture": "--picture",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        help="an .npz, .h5, .csv or .parquet, or a folder, as data.path; or a configuration (.yaml)",
    )
    label = "column of the labels in a table, as data.label; of several A,B"
    parser.add_argument("--label", action="extend", type=lambda text: text.split(","), metavar="COLUMN", help=label)
    parser.add_argument("--task", metavar="TASK", help="what the labels are, as data.task (default: classification)")
    parser.add_argument("--client", metavar="COLUMN", help="column of the clients in a table, as data.client")
    parser.add_argument(
        "--layout", choices=("nchw", "nhwc"), help="axes of an array, channels first or last, as data.layout"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw samples of each class, and who holds how many of which"
    )
    arguments.add_overrides(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE.npz",
        help="write the configuration's partition, for `partition: {path: FILE.npz}`",
    )
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    is_config = options.path.suffix in (".yaml", ".yml")
    for name, option in (_OPTIONS_OF_DATA if is_config else _OPTIONS_OF_CONFIG).items():
        if getattr(options, name):
            expected, kind = ("data", "a configuration") if is_config else ("a configuration", "data")
            raise ConfigError(f"{option} is for {expected}, and {options.path} is {kind}; leave it out")
    return _show_partition(options) if is_config else _show_data(options)


def _show_partition(options: argparse.Namespace) -> int:
    from pflmpi.config.load import load
    from pflmpi.data.federation import save
    from pflmpi.data.picture import draw_partition
    from pflmpi.experiment.build import load_federation
    from pflmpi.terminal import console

    if options.save is not None and options.save.suffix != ".npz":
        raise ConfigError(f"--save {options.save}: expected a name that ends with .npz")
    arguments.check_free(options.save, "--save", options.force)
    federation = load_federation(load(options.path, options.overrides))
    if options.save is not None:
        save(federation, options.save)
    if options.json:
        print_json({**_describe_partition(federation), "saved": options.save})
        return 0
    terminal = console()
    terminal.print(draw_partition(federation, terminal.width))
    if options.save is not None:
        terminal.print(f"saved: partition: {{path: {options.save}}}", soft_wrap=True)
    return 0


def _describe_partition(federation: "Federation") -> dict[str, Any]:
    """The partition for JSON; arrays are in client order."""
    return {
        "dataset": federation.dataset.name,
        "clients": federation.num_clients,
        "classes": federation.dataset.num_strata,
        "train_samples": federation.num_train,
        "test_samples": federation.num_test,
        "validation_samples": federation.num_validation if federation.validation else None,
        "train_samples_by_class": federation.class_counts,
        "shared_samples": federation.num_shared,
        "hash": federation.digest,
    }


def _show_data(options: argparse.Namespace) -> int:
    from pflmpi.data.own_files import read_own
    from pflmpi.data.task_kinds import TASK_KINDS

    arguments.check_output(options.picture, "--picture", force=True)
    if options.picture is not None and options.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {options.picture}: expected a name that ends with .png or .svg")
    task_kind = TASK_KINDS[options.task or "classification"]()
    if options.picture is not None and not task_kind.classes:
        raise ConfigError("--picture draws samples of each class, and the labels are no classes; leave it out")
    label = options.label[0] if options.label and len(options.label) == 1 else options.label
    dataset = read_own(options.path, label, options.client, options.layout, task_kind)
    if options.picture is not None:
        from pflmpi.analysis.drawing.samples import draw_samples

        with atomic.explain_write_error(options.picture, "choose another --picture"):
            draw_samples(dataset, options.picture)
    facts = {**_describe_data(dataset, options.layout), "picture": options.picture}
    if options.json:
        print_json(facts)
    else:
        print("\n".join(_format_facts(facts)))
    return 0


def _describe_data(dataset: "Dataset", layout: str | None) -> dict[str, Any]:
    """Shapes, values, classes and clients of a dataset, for JSON."""
    import numpy as np

    from pflmpi.data.dataset import describe_unscaled, standardise
    from pflmpi.data.own_files import has_unclear_channels

    x, names = dataset.images, dataset.own_class_names
    standard = None if has_unclear_channels(x, layout) else standardise(dataset)
    labels = dataset.labels if dataset.task_kind.classes else np.empty(0, np.int64)
    classes, counts = np.unique(labels, return_counts=True)
    untrained = np.setdiff1d(classes, labels[~dataset.official_test[: len(labels)]])
    label_facts: dict[str, Any] = {}
    if not dataset.task_kind.classes:
        y = dataset.labels
        label_facts = {
            "outputs": dataset.num_classes,
            "labels": f"{y.dtype} {list(y.shape)}, {y.min():g} to {y.max():g}",
        }
    return {
        **label_facts,
        "samples": len(x),
        "bytes": x.nbytes,
        "shape": x.shape[1:],
        "dtype": x.dtype,
        "columns": dataset.columns,
        "label_columns": dataset.label_columns,
        "minimum": x.min(),
        "maximum": x.max(),
        "mean": x.mean(dtype=np.float64),
        "standard_mean": standard and standard.mean,
        "standard_deviation": standard and standard.std,
        "scale_problem": describe_unscaled(dataset) or None,
        "classes": [names[label] for label in classes],
        "samples_by_class": counts,
        "untrained_classes": [names[label] for label in untrained],
        "test_samples": int(dataset.official_test.sum()),
        "validation_samples": 0 if dataset.official_validation is None else int(dataset.official_validation.sum()),
        "clients": None if dataset.writers is None else dataset.written_clients,
        "samples_by_client": None if dataset.writers is None else np.bincount(dataset.writers),
    }


def _format_facts(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the facts of `_describe_data` as lines."""
    shape, classes, counts = facts["shape"], facts["classes"], facts["samples_by_class"]
    kind = f"{'bytes' if facts['dtype'] == 'uint8' else 'numbers'}{', images C x H x W' if len(shape) == 3 else ''}"
    yield f"samples  {facts['samples']}, {format_bytes(facts['bytes'])}"
    yield f"shape    {' x '.join(map(str, shape))} ({kind})"
    if facts["columns"]:
        yield f"columns  {join_truncated(facts['columns'], 8)}"
    if facts["label_columns"]:
        yield f"label    {join_truncated(facts['label_columns'])} (--label names another column)"
    yield f"values   {facts['minimum']:g} to {facts['maximum']:g}, mean {facts['mean']:.4g}"
    yield f"standard {_format_standard(facts)} (data.normalize: standard)"
    if problem := facts["scale_problem"]:
        yield f"scale    {problem}"
    if classes:
        yield f"classes  {len(classes)} ({join_truncated(classes)}), {counts.min()} to {counts.max()} samples each"
    else:
        yield f"labels   {facts['labels']}; {pluralize(facts['outputs'], 'output')}"
    if facts["untrained_classes"]:
        yield f"         only in samples marked as test: {join_truncated(facts['untrained_classes'])}"
    if facts["test_samples"]:
        yield f"test     {facts['test_samples']} samples are marked as test, and not trained on (data.split: auto)"
    else:
        yield "test     no samples are marked as test; a run splits those of each client (data.test_share)"
    if facts["validation_samples"]:
        yield f"         {facts['validation_samples']} are marked as validation, and not trained on"
    if facts["clients"] is None:
        yield "clients  not in the data; choose a partition"
    else:
        sizes = facts["samples_by_client"]
        yield f"clients  {len(sizes)}, {sizes.min()} to {sizes.max()} samples each; use partition: {{name: writers}}"
        if facts["clients"] != tuple(map(str, range(len(sizes)))):
            yield f"         numbered from 0: {join_truncated(facts['clients'])}"
    if facts["picture"] is not None:
        yield f"picture  {facts['picture']}"


def _format_standard(facts: dict[str, Any]) -> str:
    """Mean and deviation of each channel, or the option that is needed to compute them."""
    if facts["standard_mean"] is None:
        return "needs --layout: nchw if channels are before the steps, nhwc if after"
    mean, std = (format_numbers(facts[f"standard_{name}"]) for name in ("mean", "deviation"))
    return f"mean {mean}, deviation {std}"

"""Test the clients of a run again, from a checkpoint: the measures of the run, also on other data or for new clients.

pflmpi evaluate runs/mine -o clients.csv
pflmpi evaluate runs/mine --round 29 --split train
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError
from pflmpi.text import format_csv, format_decimal

if TYPE_CHECKING:
    from pflmpi.analysis.checkpoint import Checkpoint
    from pflmpi.data.dataset import Dataset
    from pflmpi.experiment.build import Experiment
    from pflmpi.runtime.counts import Counts

_MOST_SHOWN = 20  # clients in the table

_WORDS = {
    "accuracy_mean": "accuracy, mean over clients",
    "accuracy_weighted": "accuracy, over all samples",
    "accuracy_std": "standard deviation over clients",
    "accuracy_bottom": "accuracy, lowest 10 % of the clients",
    "f1_macro": "macro F1, mean over clients",
    "test_loss": "loss, mean over clients",
}
_COUNTS = ("samples", "correct")
_SHARES = {*_WORDS, "accuracy"} - {"test_loss"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_overrides(parser)
    arguments.add_run(parser)
    arguments.add_changed_code(parser)
    arguments.add_round(parser)
    parser.add_argument(
        "--split",
        choices=("test", "validation", "train"),
        default="test",
        help="which samples of a client (default: test)",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="other data, of classes of the run: a file or folder as in data.path, or the name of a dataset; every "
        "client is tested on all of it, or on its own samples where the data says whose they are",
    )
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="instead test clients kept out of training, or with --data those of the data, as newcomers",
    )
    updates = "with --unseen: local updates of each before its test (default: evaluation.unseen_updates)"
    parser.add_argument("--updates", type=int, metavar="N", help=updates)
    parser.add_argument(
        "--after-training", action="store_true", help="test the models that training in the next round would leave"
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write a CSV file with a line for each client")
    arguments.add_force(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.analysis.run import read_run
    from pflmpi.experiment import evaluation
    from pflmpi.experiment.restore import reopen
    from pflmpi.experiment.stored_config import class_names

    _check_options(options)
    opened = read_run(options.run)
    round = arguments.open_checkpoint(opened, options)
    experiment = reopen(opened.path, options.overrides, changed_code=options.changed_code)
    other = None if options.data is None else evaluation.read_other_data(options.data, experiment.config.data)
    counts = _test_clients(experiment, opened.path, round.number, other, options)
    samples = f"{'unseen clients, ' if options.unseen else ''}{options.data or f'{options.split} samples'}"
    samples += ", after local training" * options.after_training
    names = class_names(experiment) or [str(label) for label in range(counts.hits.shape[1])]
    client_names = _client_names(experiment, other, options.unseen)
    _show(counts, f"{options.run}, round {round.number}, {samples}", names, client_names)
    if (prefix := _recorded_prefix(options)) is not None:
        print(_compare_with_recorded(round, counts, prefix), end="")
    if options.out is not None:
        _write(options.out, counts, names, client_names)
    return 0


def _client_names(experiment: "Experiment", other: "Dataset | None", unseen: bool) -> Sequence[str]:
    """The names [N] of the clients that are tested; () if their data has none."""
    if not unseen:
        return experiment.federation.client_names
    unseen_names = experiment.division.everyone.client_names[experiment.federation.num_clients :]
    return unseen_names if other is None else other.written_clients


def _recorded_prefix(options: argparse.Namespace) -> str | None:
    """Prefix of the arrays in which the run recorded the same test; None if the run does not make it."""
    if options.data is not None or options.updates is not None or options.after_training:
        return None
    if options.split == "test":
        return "unseen_" if options.unseen else ""
    return "validation_" if options.split == "validation" and not options.unseen else None


def _check_options(options: argparse.Namespace) -> None:
    if options.data is not None and options.split in ("validation", *([] if options.unseen else ["train"])):
        raise ConfigError(f"--split {options.split} with --data: other data is only tested on; leave one of them out")
    if options.updates is not None and not options.unseen:
        updates = f"--updates {options.updates}"
        raise ConfigError(f"{updates} is for clients kept out of training; add --unseen, or leave it out")
    arguments.check_least(options, updates=1)
    if options.after_training and options.unseen:
        raise ConfigError("--after-training with --unseen, who train before their test by --updates; leave one out")
    arguments.check_output(options.out, "-o", options.force)
    if options.out is not None:
        arguments.check_suffix(options.out, "-o", [".csv"])


def _test_clients(
    experiment: "Experiment", run: Path, round: int, other: "Dataset | None", options: argparse.Namespace
) -> "Counts":
    """Test the clients, or the unseen ones, with the state after a round; with other data, on that."""
    from pflmpi.commands.progress import bar
    from pflmpi.experiment import evaluation

    if options.updates is not None:
        experiment = evaluation.with_updates(experiment, options.updates)
    experiment = evaluation.replace_test_samples(experiment, options.split, other, options.unseen)
    if options.unseen:
        return evaluation.count_unseen(experiment, run, round)
    with bar("groups of clients") as update:
        return evaluation.count_trained(experiment, run, round, update, options.after_training)


def _show(counts: "Counts", title: str, class_names: Sequence[str], client_names: Sequence[str]) -> None:
    from rich.table import Table

    from pflmpi.runtime.counts import compute_metrics
    from pflmpi.terminal import console

    terminal = console()
    terminal.print(title, soft_wrap=True, highlight=False, markup=False)
    over_all = Table(show_header=False)
    over_all.add_row("clients, samples", f"{len(counts.samples)}, {counts.samples.sum()}")
    for name, value in compute_metrics(counts).items():
        over_all.add_row(_WORDS.get(name, name), _text(name, value))
    terminal.print(over_all)
    classes = Table("class", "samples", "accuracy")
    for label, share in enumerate(counts.class_accuracy if counts.by_class else ()):
        classes.add_row(class_names[label], str(counts.total[:, label].sum()), _text("accuracy", share))
    if counts.by_class:
        terminal.print(classes)
    columns = _client_columns(counts)
    headings = [name.replace("f1_macro", "macro F1") for name in columns]
    clients = Table("client", *(["name"] if client_names else []), *headings)
    for client, values in list(enumerate(zip(*columns.values(), strict=True)))[:_MOST_SHOWN]:
        clients.add_row(str(client), *client_names[client : client + 1], *map(_text, columns, values))
    terminal.print(clients)
    if (more := len(counts.samples) - _MOST_SHOWN) > 0:
        terminal.print(f"... and {more} more clients; -o FILE writes them all")


def _client_columns(counts: "Counts") -> dict[str, Any]:
    """Counts and measures of each client, [N] by name."""
    columns: dict[str, Any] = {"samples": counts.samples}
    if counts.by_class:
        columns |= {"correct": counts.correct, "accuracy": counts.accuracy, "f1_macro": counts.macro_f1}
    return {**columns, "loss": counts.mean_loss, **counts.values}


def _compare_with_recorded(round: "Checkpoint", counts: "Counts", prefix: str) -> str:
    """A line on whether the run recorded the same accuracies; "" if it recorded none."""
    recorded = round.metrics.get(f"{prefix}correct")
    if recorded is None:
        return ""
    different = (recorded != counts.correct).nonzero()[0]
    if not len(different):
        return "the run recorded the same accuracy for every client\n"
    values = ", ".join(f"{client}: {recorded[client]} correct" for client in different[:5].tolist())
    what = f"the run recorded other accuracies for {len(different)} clients ({values})"
    return f"{what}; was it computed on another device?\n"


def _write(path: Path, counts: "Counts", class_names: Sequence[str], client_names: Sequence[str]) -> None:
    """Write a line for each client: its name if it has one, its measures, and its accuracy in each class."""
    from pflmpi.runtime.counts import divide_or_nan

    by_class = divide_or_nan(counts.hits, counts.total[:, : counts.hits.shape[1]])  # [N, K]
    classes = [f"accuracy_class_{class_names[label]}" for label in range(by_class.shape[1])]
    columns = _client_columns(counts)
    lines: list[list[Any]] = [["client", *(["client_name"] if client_names else []), *columns, *classes]]
    for client, values in enumerate(zip(*columns.values(), strict=True)):
        lines.append([client, *client_names[client : client + 1], *values, *by_class[client]])
    with atomic.explain_write_error(path, "choose another -o"):
        atomic.write(path, format_csv(lines, exact=True).encode())


def _text(name: str, value: float) -> str:
    """A count, share or other measure as text; "-" for NaN."""
    if math.isnan(value):
        return "-"
    if name in _COUNTS:
        return str(value)
    return f"{100 * value:.2f} %" if name in _SHARES else format_decimal(value, 4)

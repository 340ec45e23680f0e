"""Which runs can be compared, by which measure, and in which options they differ."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pflmpi.analysis.run import Run, read_run
from pflmpi.analysis.selection import NamedRun, SeedGroup, label_groups, pick_evenly_spaced
from pflmpi.config.sections import by_key, find_differences
from pflmpi.data.config import DataConfig
from pflmpi.errors import CheckpointError
from pflmpi.learning.main_measure import ACCURACY, MainMeasure
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import EvaluationConfig, list_free_keys

_IRRELEVANT_SECTIONS = ("recorded", "runtime", "output", "checkpoint")  # results do not depend on them
# Where files lie and how data is held; the contents of files are compared by their recorded hashes.
_IRRELEVANT_OPTIONS = ("data.root", "data.download", "data.path", "data.resident", "partition.path", "model.check")


def open_comparable_runs(paths: Sequence[Path], step: Callable[[], None]) -> tuple[list[Run], list[str]]:
    """Opens the runs that can be compared with the first readable one.

    A run of which a file that a report shows is damaged is left out.

    Args:
        paths: folders of runs; duplicates are ignored.
        step: called after each run.

    Returns:
        The runs, and what is left out and why, one line each.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in {path.resolve(): path for path in paths}.values():
        try:
            run = read_run(path)
            check_shown(run)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            reason = why_incomparable(runs[0], run) if runs else None
            if reason is None:
                runs.append(run)
            else:
                problems.append(f"{path} cannot be compared with {runs[0].path}: {reason}; report it by itself")
        step()
    return runs, problems


def choose_main_measure(runs: Sequence[Run]) -> MainMeasure:
    """The measure by which runs are compared: the first main measure of any run that all tested runs have.

    If they share none of these it is accuracy or the test loss.
    """
    candidates = dict.fromkeys([*(run.main_measure for run in runs), ACCURACY, MainMeasure("test_loss")])
    tested = [run for run in runs if any(map(run.has, candidates))]
    return next((measure for measure in candidates if all(run.has(measure) for run in tested)), ACCURACY)


def why_incomparable(first: Run, other: Run) -> str | None:
    """Why two runs cannot be compared, naming keys and values; None if they can.

    Runs can be compared if they have the same data and partition, or drew them with another seed from the same
    configuration.
    """
    a, b = first.recorded, other.recorded
    other_seed = first.config.get("seed") != other.config.get("seed")
    if a.get("data") != b.get("data"):
        reason = _format_differences(first, other, ("data",))
        # The seed affects the data only if it chooses the samples of a limited dataset.
        if reason or not (other_seed and first.config.get("data", {}).get("limit")):
            return reason or _format_hash_difference("data", a, b)
    if a.get("partition") == b.get("partition"):
        return None
    reason = _format_differences(first, other, ("data", "partition"))
    from_files = "partition" in _list_user_files(first) and "partition" in _list_user_files(other)
    if reason or (other_seed and not from_files):
        return reason
    return _format_hash_difference("partition", a, b)


def check_shown(run: Run) -> None:
    """Raises `CheckpointError` if something is damaged that a report shows of a run; a round pruned meanwhile is not.

    Missing shards are named by the figures that need them.
    """
    run.counts, run.notes  # noqa: B018
    for number in pick_evenly_spaced(run.rounds):
        run.metric(run.main_measure.of_clients, number)


def _format_differences(first: Run, other: Run, sections: Sequence[str]) -> str | None:
    """The options of some sections in which two runs differ, as text; None if there are none."""
    options = find_differences(collect_decisive_options(first), collect_decisive_options(other)).items()
    texts = [f"{key} is {b!r} and not {a!r}" for key, (a, b) in options if key.partition(".")[0] in sections]
    return ", ".join(texts) or None


def _format_hash_difference(name: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    expected, actual = (str(recorded.get(name))[:12] for recorded in (a, b))
    return f"the hash of the {name} is {actual} and not {expected} (recorded.{name})"


_UNKNOWN = "-"
_FORK = "recorded.fork"

TextsByOption = dict[str, list[str]]  # option -> a text for each run


def differing_options(runs: Sequence[Run]) -> TextsByOption:
    """The options in which runs differ, with the value of each run."""
    options = [collect_decisive_options(run) for run in runs]
    keys = dict.fromkeys(key for run_options in options for key in run_options)
    return {
        key: [format_yaml(run_options[key]) if key in run_options else _UNKNOWN for run_options in options]
        for key in keys
        if any(key not in run_options or run_options[key] != options[0].get(key) for run_options in options)
    }


def list_compared_options(runs: Sequence[Run], columns: Collection[str] = ()) -> TextsByOption:
    """The options that differ between the runs that have them, as columns of a table; "" where a run has none.

    Args:
        columns: other columns of the table. An option of an algorithm is called without its section, unless that name
            is one of these or of a configuration.
    """
    names = {*columns, *(name for run in runs for name in run.config)}

    def shorten(key: str) -> str:
        short = key.removeprefix("algorithm.")
        return key if short in names else short

    return {
        shorten(key): ["" if text == _UNKNOWN else text for text in texts]
        for key, texts in differing_options(runs).items()
        if key not in ("algorithm.name", "training.rounds") and (len({*texts} - {_UNKNOWN}) > 1 or key == _FORK)
    }


def group_by_seed(runs: Sequence[NamedRun]) -> list[SeedGroup]:
    """Groups the runs that differ only in the seed.

    Runs with the same seed are in different groups, and so are those without a round, whose values would be in no mean;
    their groups are the last.
    """
    groups: dict[tuple[str, int], list[NamedRun]] = {}
    repeats = Counter[tuple[str, str]]()
    for named_run in runs:
        options = collect_decisive_options(named_run.run)
        seed = str(options.pop("seed", None))
        has_rounds = len(named_run.run.columns["round"]) > 0
        settings = json.dumps([options, has_rounds], sort_keys=True, default=str)
        groups.setdefault((settings, repeats[settings, seed]), []).append(named_run)
        repeats[settings, seed] += 1
    return label_groups(sorted(groups.values(), key=lambda group: not len(group[0].run.columns["round"])))


def collect_decisive_options(run: Run) -> dict[str, Any]:
    """The options that affect the results of a run, by `section.key`, with hashes of the user's files and code.

    A fork also has "recorded.fork"; see `describe_fork`.
    """
    code = {f"code.{key}": str(digest)[:12] for key, digest in run.recorded.get("code", {}).items()}
    files = {f"recorded.{name}": str(run.recorded.get(name))[:12] for name in _list_user_files(run)}
    fork = {_FORK: text} if (text := describe_fork(run)) else {}
    options = add_later_defaults(by_key(run.config)).items()
    return {**{key: value for key, value in options if _affects_results(key)}, **files, **code, **fork}


def describe_fork(run: Run) -> str:
    """The options that were others until the run left its parent, and until that one left its own, as text.

    "" if they are options that a resumed run may change too, or none: then the fork is what its parent would be.
    """
    training = run.config.get("training", {})
    free = list_free_keys(training.get("schedule", ""), training.get("decay_rounds"))
    texts = []
    origin = run.recorded.get("fork")
    while isinstance(origin, dict):
        changes = origin.get("changes")
        for key, change in changes.items() if isinstance(changes, dict) else ():
            if _affects_results(key) and key not in free:
                before = change[0] if isinstance(change, list) and change else change
                texts.append(f"{key} was {format_yaml(before)} until round {origin.get('round')}")
        origin = origin.get("fork")
    return ", ".join(texts)


def _list_user_files(run: Run) -> list[str]:
    """Which of "data" and "partition" come from files of the user, with a hash that does not depend on the seed."""
    data, partition = run.config.get("data", {}), run.config.get("partition", {})
    if data.get("limit"):  # the seed chooses the samples
        return []
    names = ["data"] if data.get("path") else []
    if partition.get("path") and not data.get("validation"):  # the seed chooses the validation samples
        names.append("partition")
    return names


def _affects_results(key: str) -> bool:
    return str(key).partition(".")[0] not in _IRRELEVANT_SECTIONS and key not in _IRRELEVANT_OPTIONS


def add_later_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the options that were introduced after the run was made; their defaults are what it did then."""
    return {**options, **{key: value for key, value in _defaults().items() if key not in options}}


@cache
def _defaults() -> dict[str, Any]:
    sections = {"data": DataConfig(name=""), "training": TrainingConfig(), "evaluation": EvaluationConfig(measures=[])}
    keys = by_key({name: section.model_dump() for name, section in sections.items()})
    return {**keys, "model.cache_features": False, "partition.draw": "run"}


def format_yaml(value: object) -> str:
    """A value as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)

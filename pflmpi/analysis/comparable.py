"""Comparing runs: which can be compared, and in which options they differ."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pflmpi.analysis.run import Run, open_run
from pflmpi.analysis.selection import NamedRun, SeedGroup, label_groups, spread_over
from pflmpi.config.sections import by_key, differing
from pflmpi.data.config import DataConfig
from pflmpi.errors import CheckpointError
from pflmpi.learning.main_measure import ACCURACY, MainMeasure
from pflmpi.learning.training import TrainingConfig
from pflmpi.runtime.config import EvaluationConfig
from pflmpi.store.checked_hdf5 import truncated_problem
from pflmpi.store.names import round_path

_NOT_COMPARED = ("recorded", "runtime", "output", "checkpoint")  # sections that results do not depend on
# These say where something lies or how it is held; what lies there is compared by its recorded hash.
_WHERE_ONLY = ("data.root", "data.download", "data.path", "data.resident", "partition.path", "model.check")


def open_comparable_runs(paths: Sequence[Path], step: Callable[[], None]) -> tuple[list[Run], list[str]]:
    """The runs that can be compared with the first readable one, and what is left out and why.

    Damaged checkpoints of the runs are among the problems; the rest of such a run is shown.

    Args:
        paths: folders; one that is named twice counts once.
        step: called after each.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in {path.resolve(): path for path in paths}.values():
        try:
            run = open_run(path)
            run.columns  # noqa: B018  damaged metrics are found here
        except CheckpointError as error:
            problems.append(str(error))
        else:
            reason = why_incomparable(runs[0], run) if runs else None
            if reason is None:
                runs.append(run)
                problems += find_damage(run)
            else:
                problems.append(f"{path} cannot be compared with {runs[0].path}: {reason}; report it by itself")
        step()
    return runs, problems


def main_measure(runs: Sequence[Run]) -> MainMeasure:
    """The measure by which runs are compared: the main one of the first of them that all have, else their loss."""
    candidates = dict.fromkeys([*(run.main_measure for run in runs), ACCURACY, MainMeasure("test_loss")])
    tested = [run for run in runs if any(map(run.has, candidates))]
    return next((measure for measure in candidates if all(run.has(measure) for run in tested)), ACCURACY)


def why_incomparable(first: Run, other: Run) -> str | None:
    """Why two runs cannot be compared, naming keys and values; None if they can.

    They can if they have the same data and partition, or drew them from another seed with the same configuration.
    """
    a, b = first.recorded, other.recorded
    another_seed = first.config.get("seed") != other.config.get("seed")
    if a.get("data") != b.get("data"):
        reason = _format_differences(first, other, ("data",))
        # The seed chooses the samples of a limited dataset; otherwise it has no part in the data.
        if reason or not (another_seed and first.config.get("data", {}).get("limit")):
            return reason or _format_hash_difference("data", a, b)
    if a.get("partition") == b.get("partition"):
        return None
    reason = _format_differences(first, other, ("data", "partition"))
    drawn = another_seed and not ("partition" in _list_user_files(first) and "partition" in _list_user_files(other))
    return reason or (None if drawn else _format_hash_difference("partition", a, b))


def find_damage(run: Run) -> list[str]:
    """What a report leaves out of a run: rounds with files that are damaged, foreign or, the newest's, lost."""
    problems = [problem for number in run.rounds if (problem := truncated_problem(round_path(run.path, number)))]
    unread = []
    for number in spread_over(run.rounds):
        if of_round := [problem for path, problem in run.problems(number).items() if path.exists()]:
            problems += of_round
        elif isinstance(metric := run.metric_or_problem(run.main_measure.of_clients, number), str):
            unread.append(f"{metric}; these values of clients are left out")
    if run.rounds and not problems:
        problems += run.problems(run.rounds[-1]).values()
    problems = [f"{problem}; its round is left out" for problem in dict.fromkeys(problems)] + unread
    try:
        run.counts  # noqa: B018  a partition.csv that is not the run's is found here
    except CheckpointError as error:
        problems.append(f"{error}; its partition is left out")
    return problems


def _format_differences(first: Run, other: Run, sections: Sequence[str]) -> str | None:
    options = differing(decisive_options(first), decisive_options(other)).items()
    texts = [f"{key} is {b!r} and not {a!r}" for key, (a, b) in options if key.partition(".")[0] in sections]
    return ", ".join(texts) or None


def _format_hash_difference(what: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    expected, actual = (str(recorded.get(what))[:12] for recorded in (a, b))
    return f"the hash of the {what} is {actual} and not {expected} (recorded.{what})"


_UNKNOWN = "-"

TextsByName = dict[str, list[str]]  # name -> a text for each run


def differing_options(runs: Sequence[Run]) -> TextsByName:
    """The options in which the configurations of runs differ, with the value of each."""
    options = [decisive_options(run) for run in runs]
    keys = dict.fromkeys(key for of_run in options for key in of_run)
    return {
        key: [yaml_text(of_run[key]) if key in of_run else _UNKNOWN for of_run in options]
        for key in keys
        if any(key not in of_run or of_run[key] != options[0].get(key) for of_run in options)
    }


def list_compared_options(runs: Sequence[Run]) -> TextsByName:
    """Options with different values among the runs that have them; "" for a run that has not."""
    return {
        key.removeprefix("algorithm."): ["" if text == _UNKNOWN else text for text in texts]
        for key, texts in differing_options(runs).items()
        if key not in ("algorithm.name", "training.rounds") and len({*texts} - {_UNKNOWN}) > 1
    }


def seed_groups(runs: Sequence[NamedRun]) -> list[SeedGroup]:
    """The runs in groups whose settings differ in the seed alone; of runs with one seed each is in another group."""
    groups: dict[tuple[str, int], list[NamedRun]] = {}
    same = Counter[tuple[str, str]]()
    for named_run in runs:
        options = decisive_options(named_run.run)
        seed = str(options.pop("seed", None))
        others = json.dumps(options, sort_keys=True, default=str)
        groups.setdefault((others, same[others, seed]), []).append(named_run)
        same[others, seed] += 1
    return label_groups(list(groups.values()))


def unlike_lengths(groups: Sequence[SeedGroup]) -> list[str]:
    """A line for each group whose seeds have unlike numbers of rounds: what tables and figures then average."""
    return [
        f"{group.label}: its seeds have {' and '.join(map(str, group.lengths))} rounds; tables have the mean over the "
        f"end of each, figures over rounds go {group.common_rounds}"
        for group in groups
        if group.common_rounds
    ]


def decisive_options(run: Run) -> dict[str, Any]:
    """The options of a run that results depend on, by `section.key`, with hashes of the user's files and code."""
    code = {f"code.{key}": str(digest)[:12] for key, digest in run.recorded.get("code", {}).items()}
    files = {f"recorded.{name}": str(run.recorded.get(name))[:12] for name in _list_user_files(run)}
    return {**select_decisive_options(run.config), **files, **code}


def _list_user_files(run: Run) -> list[str]:
    """Of data and partition, those in files of the user whose hash has nothing of the seed."""
    data, partition = run.config.get("data", {}), run.config.get("partition", {})
    if data.get("limit"):  # the seed chooses the samples
        return []
    saved = partition.get("path") and not data.get("validation")  # which the seed chooses too
    return [name for name, path in (("data", data.get("path")), ("partition", saved)) if path]


def select_decisive_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configuration that results depend on, with defaults of those that a run may be too old for."""
    options = by_key({key: value for key, value in config.items() if key not in _NOT_COMPARED})
    return {key: value for key, value in add_later_defaults(options).items() if key not in _WHERE_ONLY}


def add_later_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by `section.key` with those that came after the run, whose defaults are what it did."""
    return {**options, **{key: value for key, value in _defaults().items() if key not in options}}


@cache
def _defaults() -> dict[str, Any]:
    sections = {"data": DataConfig(name=""), "training": TrainingConfig(), "evaluation": EvaluationConfig(measures=[])}
    keys = by_key({name: section.model_dump() for name, section in sections.items()})
    return {**keys, "model.cache_features": False, "partition.draw": "run"}


def yaml_text(value: object) -> str:
    """A value as in YAML."""
    value = list(value) if isinstance(value, tuple) else value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

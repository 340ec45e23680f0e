"""Resources of a Slurm job: ranks and memory as `plan` forecasts them, time as earlier runs took it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path

from pflmpi.cluster import submission
from pflmpi.cluster.batch_script import BatchScript, Options, count_ranks, resolve_options
from pflmpi.cluster.run_status import format_duration, read_run_status
from pflmpi.config import stored, yaml_file
from pflmpi.config.load import Config
from pflmpi.config.sections import by_key
from pflmpi.errors import ConfigError, UserError, show
from pflmpi.forecast.advice import node_bytes
from pflmpi.forecast.forecast import Forecast, Resources, predict
from pflmpi.runtime.config import FREE_ON_RESUME
from pflmpi.store import job_file, run_folder
from pflmpi.text import format_bytes, pluralize

_MIB = 1 << 20
_UNITS = {"K": 1 << 10, "": _MIB, "M": _MIB, "G": 1 << 30, "T": 1 << 40}  # of --mem
MARGIN = 1.5  # times the seconds of earlier rounds
START_UP = 600  # further seconds to import torch on all ranks and to read data
# Values that a run replaces by what it has chosen; they are not compared with what it has recorded.
_RESOLVED_BY_RUN = {"runtime.executor": "auto", "runtime.lanes": None, "data.split": "auto"}


class Unmeasured(ConfigError):
    """No earlier run tells how long the rounds of a job will take."""


def resolve_auto_options(
    batch: BatchScript, runs: Mapping[Path, Config], out: Path, environ: Mapping[str, str]
) -> BatchScript:
    """Returns the job with `auto` options replaced, and the memory that was forecast for it.

    Args:
        runs: the configuration of each run folder of the job; the largest and the longest decide.
        out: folder of the run, or of the sweep.

    Raises:
        ConfigError: `--mem` is less than a run needs, or an `auto` option cannot be determined.
        Unmeasured: `--time=auto` cannot be determined.
    """
    partition = submission.partition_name(batch)
    # Configurations that differ in the seed alone need about the same.
    configs = {repr({**config.resolved(), "seed": None}): config for config in runs.values()}.values()
    if batch.options.get("ntasks") == "auto":
        num_ranks = _count_useful_ranks(
            resolve_options(batch.options, batch.others), configs, submission.partition(partition, environ)[1]
        )
        batch = _set_option(batch, "ntasks", str(num_ranks))
    if (memory := batch.options.get("mem")) and (memory == "auto" or not batch.array):
        batch = _set_memory(batch, configs)
    if batch.options.get("time") == "auto":
        batch = _set_option(batch, "time", str(_estimate_minutes(batch, runs, out, partition, environ)))
    return batch


def _set_option(batch: BatchScript, option: str, value: str) -> BatchScript:
    return replace(batch, options={**batch.options, option: value})


def _predict(config: Config, options: Options, ranks: int, cores: int) -> Forecast:
    """Forecasts a run in a job on nodes with so many cores."""
    nodes, gpus = _parse_number(options, "nodes", 1), _parse_number(options, "gpus-per-node", 0)
    return predict(config, Resources(ranks, nodes, gpus, cores, memory=0, gpu_memory=None, delay=None, rate=None))


def _count_useful_ranks(options: Options, configs: Collection[Config], cores: int) -> int:
    """Counts the ranks that have clients to train at the same time, and a dedicated server's rank if there is one.

    Args:
        cores: of a node, each for a thread of a rank; nodes with GPUs get a rank per GPU, and one for the server.
    """
    nodes, gpus = _parse_number(options, "nodes", 1), _parse_number(options, "gpus-per-node", 0)
    num_ranks = nodes
    if not gpus and not cores:
        raise ConfigError(
            "--ntasks=auto: Slurm does not say how many cores a node of the partition has; give --gpus-per-node, or "
            "the number of ranks"
        )
    for config in configs:
        width = max(_parse_number(options, "cpus-per-task", 1), config.runtime.threads)
        slots = nodes * gpus + 1 if gpus else nodes * max(cores // width, 1)
        rounds = _predict(config, options, slots, cores or slots).rounds
        busy = [[bool(groups) for groups in plan.training] for plan in rounds]  # by round and rank
        has_dedicated_server = not any(of_ranks[0] for of_ranks in busy)
        num_ranks = max(num_ranks, max(map(sum, busy), default=0) + has_dedicated_server)
    return num_ranks


def _set_memory(batch: BatchScript, configs: Collection[Config]) -> BatchScript:
    """Returns the job with `--mem=auto` replaced, and its planned memory set if it could be forecast."""
    options, memory = resolve_options(batch.options, batch.others), batch.options["mem"] or ""
    nodes, needed = _parse_number(options, "nodes", 1), 0
    for config in configs:
        num_ranks = count_ranks(options, config.runtime.threads)[0] or 1
        try:
            forecast = _predict(config, options, num_ranks, ceil(num_ranks / nodes))
        except UserError as error:
            if memory == "auto":
                raise
            show(UserError(f"--mem={memory} is not compared with what the run needs: {error}"))
            return batch
        needed = max(needed, ceil(max(node_bytes(forecast, node) for node in range(nodes))))
    if memory != "auto" and parse_memory(memory) < needed:
        raise ConfigError(
            f"--mem={memory}: plan counts {format_bytes(needed)} for a node, with {pluralize(num_ranks, 'rank')} on "
            f"{pluralize(nodes, 'node')}; give --mem={ceil(needed / _MIB)}M or auto, take more nodes, or, where you "
            f"have seen it fit, write -- --mem={memory}"
        )
    sufficient = f"{ceil(needed / _MIB)}M" if memory == "auto" else memory
    return replace(_set_option(batch, "mem", sufficient), planned_memory=needed)


def parse_memory(text: str) -> float:
    """Bytes of a `--mem` value; infinite for 0 (all of a node) and for invalid text, which sbatch refuses.

    >>> parse_memory("150"), parse_memory("2G"), parse_memory("0")
    (157286400.0, 2147483648.0, inf)
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return float(match[1]) * _UNITS[match[2]] or float("inf") if match else float("inf")


def _estimate_minutes(
    batch: BatchScript, runs: Mapping[Path, Config], out: Path, partition: str, environ: Mapping[str, str]
) -> int:
    """Estimates the minutes of the longest task; a job that requeues itself gets at most its partition's limit."""
    options, needs = resolve_options(batch.options, batch.others), []
    for run, config in runs.items():
        num_ranks = count_ranks(options, config.runtime.threads)[0]
        per_round = _read_seconds_per_round(run, config, num_ranks, out, partition)
        if per_round is None:
            on = f"{pluralize(num_ranks, 'rank')} in " if num_ranks else ""
            raise Unmeasured(
                f"--time=auto: no run of this configuration, in {run} or beside it, has been computed by {on}a job on "
                f"{partition or 'the default partition'}; give a --time, or --trial: a job of a few minutes then "
                "measures it first, and what that computes is kept"
            )
        needs.append(START_UP + MARGIN * per_round * (config.training.rounds - max(run_folder.rounds(run), default=0)))
    size = len(batch.packs[0]) if batch.packs else 1  # runs of a task, one after another
    needed = max(sum(needs[first : first + size]) for first in range(0, len(needs), size))
    limit = submission.partition(partition, environ)[0]
    if needed > limit and not batch.requeue:
        raise ConfigError(
            f"--time=auto: the job needs {format_duration(needed)}, and {partition or 'the default partition'} allows "
            f"{format_duration(limit)}; take more ranks or another partition, or add --requeue, by which it goes on in "
            "a next job"
        )
    return int(limit // 60) if needed > limit else ceil(needed / 60)


def _read_seconds_per_round(
    run: Path, config: Config, num_ranks: int | None, out: Path, partition: str
) -> float | None:
    """Reads the seconds of a round of the slowest run with this configuration and any seed, in `run` or beside it.

    Only runs of jobs count, with the same partition and number of ranks where both are known.
    """
    seconds = []
    for folder in sorted(path.parent for path in run.parent.glob("*/jobs.txt")):
        submissions = job_file.read_submissions(folder) or job_file.read_submissions(out)
        partitions = [record.partition for record in submissions.values()][-1:]
        state = read_run_status(folder) if partitions in ([], [None], [partition]) else None
        if state is None or state.per_round is None:
            continue
        if num_ranks is not None and state.ranks is not None and num_ranks != state.ranks:
            continue
        if _is_same_config(stored.read(folder), config):
            seconds.append(state.per_round)
    return max(seconds, default=None)


def _is_same_config(values: Mapping[str, object], config: Config) -> bool:
    """Whether a run has this configuration; seed, length and keys that may change on resume do not matter."""
    old, new = by_key(values), by_key(yaml_file.parse(yaml_file.dump(config.resolved()), ""))
    free = {*FREE_ON_RESUME, "seed"} - {"runtime.device"}
    return all(
        old.get(key) == value or key in free or (key in _RESOLVED_BY_RUN and value == _RESOLVED_BY_RUN[key])
        for key, value in new.items()
    )


def _parse_number(options: Options, name: str, default: int) -> int:
    """The number in an option, such as 2 in `--gpus-per-node=a100:2`."""
    text = options.get(name)
    if text is None:
        return default
    if not (number := text.rpartition(":")[2]).isdecimal() or not int(number):
        raise ConfigError(f"--{name}={text}: what `plan` counts is for a number; give one, or leave --mem and auto out")
    return int(number)

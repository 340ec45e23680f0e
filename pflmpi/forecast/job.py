"""What a Slurm job needs: ranks and memory as `plan` counts them, time as earlier runs took it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path

from pflmpi.cluster.batch_script import BatchScript, Options, effective, ranks
from pflmpi.cluster.status import clock, run_status
from pflmpi.cluster.submission import partition, partition_name
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
MARGIN = 1.5  # of the time that rounds took before
START_UP = 600  # seconds, besides, to import torch on all ranks and to read data
# What a run has recorded in place of these: it is not compared.
_RESOLVED_BY_RUN = {"runtime.executor": "auto", "runtime.lanes": None, "data.split": "auto"}


class Unmeasured(ConfigError):
    """No earlier run says how long the rounds of a job will take."""


def sized(batch: BatchScript, runs: Mapping[Path, Config], out: Path, environ: Mapping[str, str]) -> BatchScript:
    """The job with what it needs in place of `auto`, and the memory that was counted for it.

    Args:
        runs: what is to do: folders of runs, each with its configuration. The largest and the longest decide.
        out: folder of the run, or of the sweep.

    Raises:
        ConfigError: `--mem` is less than one run needs, or what is `auto` cannot be known.
        Unmeasured: that is `--time`.
    """
    where = partition_name(effective(batch.options, batch.others), environ)
    # Configurations that differ in the seed alone need about the same.
    configs = {repr({**config.resolved(), "seed": None}): config for config in runs.values()}.values()
    if batch.options.get("ntasks") == "auto":
        number = _count_useful_ranks(effective(batch.options, batch.others), configs, partition(where, environ)[1])
        batch = _set_option(batch, "ntasks", str(number))
    if (memory := batch.options.get("mem")) and (memory == "auto" or not batch.array):
        batch = _set_memory(batch, configs)
    if batch.options.get("time") == "auto":
        batch = _set_option(batch, "time", str(_estimate_minutes(batch, runs, out, where, environ)))
    return batch


def _set_option(batch: BatchScript, option: str, value: str) -> BatchScript:
    return replace(batch, options={**batch.options, option: value})


def _predict(config: Config, options: Options, ranks: int, cores: int) -> Forecast:
    """The forecast of a run in a job; `cores` of a node."""
    return predict(config, Resources(ranks, _nodes(options), _gpus(options), cores, 0, None, None, None))


def _count_useful_ranks(options: Options, configs: Collection[Config], cores: int) -> int:
    """As many ranks as have clients to train at the same time, and one that serves, if none of them does.

    Args:
        cores: of a node, each for a thread of a rank; on GPUs there is a rank for each, and one that serves.
    """
    nodes, gpus = _nodes(options), _gpus(options)
    number = nodes
    if not gpus and not cores:
        raise ConfigError(
            "--ntasks=auto: Slurm does not say how many cores a node of the partition has; give --gpus-per-node, or "
            "the number of ranks"
        )
    for config in configs:
        width = max(_parse_number(options, "cpus-per-task", 1), config.runtime.threads)
        slots = nodes * gpus + 1 if gpus else nodes * max(cores // width, 1)
        rounds = _predict(config, options, slots, cores or slots).rounds
        busy = [[bool(groups) for groups in scheduled.training] for scheduled in rounds]
        number = max(number, max(map(sum, busy), default=0) + (not any(of_ranks[0] for of_ranks in busy)))
    return number


def _set_memory(batch: BatchScript, configs: Collection[Config]) -> BatchScript:
    """The job with `--mem=auto` replaced and, where that could be counted, what a node needs."""
    options, memory = effective(batch.options, batch.others), batch.options["mem"] or ""
    nodes, needed = _nodes(options), 0
    for config in configs:
        number = ranks(options, config.runtime.threads)[0] or 1
        try:
            forecast = _predict(config, options, number, ceil(number / nodes))
        except UserError as error:
            if memory == "auto":
                raise
            show(UserError(f"--mem={memory} is not compared with what the run needs: {error}"))
            return batch
        needed = max(needed, ceil(max(node_bytes(forecast, node) for node in range(nodes))))
    if memory != "auto" and parse_memory(memory) < needed:
        raise ConfigError(
            f"--mem={memory}: plan counts {format_bytes(needed)} for a node, with {pluralize(number, 'rank')} on "
            f"{pluralize(nodes, 'node')}; give --mem={ceil(needed / _MIB)}M or auto, take more nodes, or, where you "
            f"have seen it fit, write -- --mem={memory}"
        )
    sufficient = f"{ceil(needed / _MIB)}M" if memory == "auto" else memory
    return replace(_set_option(batch, "mem", sufficient), planned_memory=needed)


def parse_memory(text: str) -> float:
    """Bytes in what `--mem` takes; infinite for 0, all of a node, and for what is no such thing, which sbatch refuses.

    >>> parse_memory("150"), parse_memory("2G"), parse_memory("0")
    (157286400.0, 2147483648.0, inf)
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return float(match[1]) * _UNITS[match[2]] or float("inf") if match else float("inf")


def _estimate_minutes(
    batch: BatchScript, runs: Mapping[Path, Config], out: Path, where: str, environ: Mapping[str, str]
) -> int:
    """Minutes of a job for the longest of its tasks, at most those of its partition if it is requeued."""
    options, needs = effective(batch.options, batch.others), []
    for run, config in runs.items():
        number = ranks(options, config.runtime.threads)[0]
        per_round = _read_seconds_per_round(run, config, number, out, where)
        if per_round is None:
            on = f"{pluralize(number, 'rank')} in " if number else ""
            raise Unmeasured(
                f"--time=auto: no run of this configuration, in {run} or beside it, has been computed by {on}a job on "
                f"{where or 'the default partition'}; give a --time, or --trial: a job of a few minutes then measures "
                "it first, and what that computes is kept"
            )
        needs.append(START_UP + MARGIN * per_round * (config.training.rounds - max(run_folder.rounds(run), default=0)))
    size = len(batch.packs[0]) if batch.packs else 1  # runs of a task, one after another
    needed = max(sum(needs[first : first + size]) for first in range(0, len(needs), size))
    limit = partition(where, environ)[0]
    if needed > limit and not batch.requeue:
        raise ConfigError(
            f"--time=auto: the job needs {clock(needed)}, and {where or 'the default partition'} allows "
            f"{clock(limit)}; take more ranks or another partition, or add --requeue, by which it goes on in a next job"
        )
    return int(limit // 60) if needed > limit else ceil(needed / 60)


def _read_seconds_per_round(run: Path, config: Config, number: int | None, out: Path, where: str) -> float | None:
    """Seconds of a round in the slowest run of a configuration, of any seed, in its folder or beside it.

    A run counts that a job has computed, on this partition and with this number of ranks, as far as that is known.
    """
    seconds = []
    for folder in sorted(path.parent for path in run.parent.glob("*/jobs.txt")):
        submissions = job_file.submissions(folder) or job_file.submissions(out)
        partitions = [*(submission.partition for submission in submissions.values())][-1:]
        state = run_status(folder) if partitions in ([], [None], [where]) else None
        if state is None or state.per_round is None or (None not in (number, state.ranks) and number != state.ranks):
            continue
        if _is_same_config(stored.read(folder), config):
            seconds.append(state.per_round)
    return max(seconds, default=None)


def _is_same_config(values: Mapping[str, object], config: Config) -> bool:
    """Whether a run has this configuration, but for its seed, its length and what says where files are."""
    old, new = by_key(values), by_key(yaml_file.parse(yaml_file.dump(config.resolved()), ""))
    free = {*FREE_ON_RESUME, "seed"} - {"runtime.device"}
    return all(
        old.get(key) == value or key in free or (key in _RESOLVED_BY_RUN and value == _RESOLVED_BY_RUN[key])
        for key, value in new.items()
    )


def _nodes(options: Options) -> int:
    return _parse_number(options, "nodes", 1)


def _gpus(options: Options) -> int:
    return _parse_number(options, "gpus-per-node", 0)


def _parse_number(options: Options, name: str, default: int) -> int:
    """The number that an option gives, such as 2 of `--gpus-per-node=a100:2`."""
    text = options.get(name)
    if text is None:
        return default
    if not (number := text.rpartition(":")[2]).isdecimal() or not int(number):
        raise ConfigError(f"--{name}={text}: what `plan` counts is for a number; give one, or leave --mem and auto out")
    return int(number)

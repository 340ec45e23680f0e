"""The memory that a Slurm job needs on a node, as `plan` counts it, against its `--mem`."""

import re
from math import ceil

from pflmpi.cluster.batch_script import Options
from pflmpi.config.load import Config
from pflmpi.errors import ConfigError, UserError, show
from pflmpi.forecast.advice import node_bytes
from pflmpi.forecast.forecast import Resources, predict
from pflmpi.text import counted, size

_MIB = 1 << 20
_UNITS = {"K": 1 << 10, "": _MIB, "M": _MIB, "G": 1 << 30, "T": 1 << 40}  # of --mem


def with_memory(config: Config, options: Options) -> tuple[Options, int]:
    """The options with `--mem=auto` replaced, and the bytes of a node that were counted.

    Raises:
        ConfigError: `--mem` is less than that; or `auto`, and it cannot be counted.
    """
    nodes, gpus = _number(options, "nodes", 1), _number(options, "gpus-per-node", 0)
    ranks = _ranks(options, nodes, gpus, config.runtime.threads)
    auto, requested = options["mem"] == "auto", bytes_of(options["mem"] or "")
    try:
        forecast = predict(config, Resources(ranks, nodes, gpus, ceil(ranks / nodes), 0, None, None, None))
    except UserError as error:
        if auto:
            raise
        show(UserError(f"--mem={options['mem']} is not compared with what the run needs: {error}"))
        return options, 0
    needed = ceil(max(node_bytes(forecast, node) for node in range(nodes)))
    if not auto and requested < needed:
        raise ConfigError(
            f"--mem={options['mem']}: plan counts {size(needed)} for a node, with {counted(ranks, 'rank')} on "
            f"{counted(nodes, 'node')}; give --mem={ceil(needed / _MIB)}M or auto, take more nodes, or, where you have "
            f"seen it fit, write -- --mem={options['mem']}"
        )
    return {**options, "mem": f"{ceil(needed / _MIB)}M" if auto else options["mem"]}, needed


def bytes_of(text: str) -> float:
    """Bytes in what `--mem` takes; infinite for 0, all of a node, and for what is no such thing, which sbatch refuses.

    >>> bytes_of("150"), bytes_of("2G"), bytes_of("0")
    (157286400.0, 2147483648.0, inf)
    """
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return float(match[1]) * _UNITS[match[2]] or float("inf") if match else float("inf")


def _ranks(options: Options, nodes: int, gpus: int, threads: int) -> int:
    """Ranks of a job; where Slurm starts a single task, that starts one for each of its GPUs or cores."""
    tasks = _number(options, "ntasks", nodes * _number(options, "ntasks-per-node", 1))
    return tasks if tasks > 1 else gpus or max(_number(options, "cpus-per-task", 1) // threads, 1)


def _number(options: Options, name: str, default: int) -> int:
    """The number that an option gives, such as 2 of `--gpus-per-node=a100:2`."""
    text = options.get(name)
    if text is None:
        return default
    if not (number := text.rpartition(":")[2]).isdecimal() or not int(number):
        raise ConfigError(f"--{name}={text}: --mem is compared with plan for a number; give one, or write -- --mem=...")
    return int(number)

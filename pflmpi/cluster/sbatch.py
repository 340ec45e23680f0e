"""The options of sbatch: those that `submit` knows, and others as they are."""

import argparse
from collections.abc import Mapping, Sequence

from pflmpi.errors import ConfigError

# With the letters that sbatch has for them; `--requeue` is ours. Others are given after `--`.
KNOWN = {
    "nodes": "N",
    "ntasks": "n",
    "ntasks-per-node": "",
    "cpus-per-task": "c",
    "gpus-per-node": "",
    "time": "t",
    "mem": "",
    "partition": "p",
    "account": "A",
    "qos": "q",
    "output": "o",
}
_RESOLUTION = 60  # seconds: Slurm may send a signal as much earlier

Options = Mapping[str, str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Registers the options of sbatch that `submit` knows; those after `--` are in `options.sbatch`."""
    group = parser.add_argument_group("options of sbatch", "others go after --, such as: -- --exclusive --comment=A")
    for name, letter in KNOWN.items():
        group.add_argument(*([f"-{letter}"] if letter else []), f"--{name}", metavar="X")


def given(options: argparse.Namespace) -> Options:
    """The known ones that were given, by their long names."""
    values = {name: getattr(options, name.replace("-", "_")) for name in KNOWN}
    return {name: value for name, value in values.items() if value is not None}


def refuse_unknown(words: Sequence[str], command: str) -> None:
    """Raise for words before `--` that the command does not know, if there are any."""
    if words and not words[0].startswith("-"):
        raise ConfigError(f"unexpected argument {words[0]!r}: {command} takes one CONFIG")
    if words:
        raise ConfigError(
            f"unknown option {words[0]!r}; `pflmpi {command} --help` lists those that are known, and sbatch's own go "
            f"after --, as they are: pflmpi {command} ... -- {words[0]}"
        )


def check_warning(time: str, warning: str) -> None:
    """Raise if Slurm would send a warning such as USR1@120 as soon as a job with this time limit starts."""
    limit, needed = seconds(time), int(warning.partition("@")[2]) + _RESOLUTION
    if limit is not None and limit <= needed:
        raise ConfigError(
            f"--requeue with --time={time}: Slurm warns the run {needed - _RESOLUTION} s before the limit, or up to a "
            f"minute earlier, so a job of {limit} s would be stopped as it starts; give a --time of more than "
            f"{-(-needed // 60)} minutes, or a later warning (-- --signal=USR1@SECONDS)"
        )


def seconds(text: str) -> int | None:
    """Seconds in what `--time` takes and Slurm prints; None for no limit, and for what is no time.

    >>> seconds("30"), seconds("1:30"), seconds("2:00:00"), seconds("1-12"), seconds("UNLIMITED")
    (1800, 90, 7200, 129600, None)
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    # Minutes come first, unless there are three parts or days before.
    units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
    clock_seconds = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return clock_seconds + 86400 * int(days or 0) or None  # 0 is no limit


def words_of(options: Options, others: Sequence[str] = ()) -> list[str]:
    """Options as written on a command line, those of the user last, so that they override ours.

    >>> words_of({"nodes": "2", "requeue": None}, ["--gres", "gpu:2"])
    ['--nodes=2', '--requeue', '--gres', 'gpu:2']
    """
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    for word in [*words, *others]:
        if "\n" in word or "\\" in word:
            raise ConfigError(f"{word!r}: sbatch cannot read a line break or a backslash here; choose other names")
    return [*words, *others]

"""The options of sbatch: separated from ours on a command line, and checked before Slurm sees them."""

from collections.abc import Mapping, Sequence

from pflmpi.errors import ConfigError
from pflmpi.registry import unknown

# Long names, with the letter where there is one, up to Slurm 25.05. `--array`, `--requeue` and `--help` are ours.
_VALUED = """
account:A acctg-freq batch bb bbf begin:b chdir:D cluster-constraint clusters:M comment constraint:C container
container-id core-spec:S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task:c deadline delay-boot dependency:d
distribution:m error:e exclude:x export export-file extra extra-node-info:B gid gpu-bind gpu-freq gpus:G gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input:i job-name:J kill-on-invalid-dep licenses:L mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile:F nodelist:w nodes:N ntasks:n ntasks-per-core
ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output:o partition:p power prefer priority profile qos:q
reservation segment signal sockets-per-node switches thread-spec threads-per-core time:t time-min tmp tres-bind
tres-per-task uid wait-all-nodes wckey wrap
"""
_OPTIONAL = "exclusive get-user-env nice no-kill:k oom-kill-step propagate resv-ports"  # a value only after `=`
_FLAGS = """
consolidate-segments contiguous hold:H ignore-pbs no-requeue overcommit:O oversubscribe parsable quiet:Q reboot
spread-job stepmgr test-only usage use-min-nodes verbose:v version:V wait:W
"""

_REFUSED = {
    "chdir": "the job starts in the folder where submit is started; change to it first",
    "comment": "`pflmpi status` needs it to find the run of a job",
    "parsable": "submit reads what sbatch prints",
    "quiet": "submit reads what sbatch prints",
    "test-only": "use --dry-run",
    "usage": "use --help",
    "verbose": "submit reads what sbatch prints",
    "version": "use sbatch --version",
    "wait": "submit ends when the job is queued; `pflmpi status` shows how it goes",
    "wrap": "submit writes the batch script itself",
}

_RESOLUTION = 60  # seconds: Slurm may send a signal as much earlier

Options = Mapping[str, str | None]


def _names(text: str) -> dict[str, str]:
    return {word.partition(":")[0]: word.partition(":")[2] for word in text.split()}


_KNOWN = {**_names(_VALUED), **_names(_OPTIONAL), **_names(_FLAGS)}
_LETTERS = {letter: name for name, letter in _KNOWN.items() if letter}


def split(words: Sequence[str]) -> tuple[list[str], Options]:
    """The words of a command line that are not sbatch's, and sbatch's options: from long name to value or None.

    >>> split(["run.yaml", "-N2", "--time", "1:00:00", "--exclusive", "--requeue"])
    (['run.yaml', '--requeue'], {'nodes': '2', 'time': '1:00:00', 'exclusive': None})

    Raises:
        ConfigError: one of sbatch's is given twice, lacks its value, or cannot be given to submit.
    """
    ours: list[str] = []
    found: dict[str, str | None] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, value = _read(word)
        if name is None:
            ours.append(word)
            continue
        if name in _names(_VALUED):
            if value is None and not left:
                raise ConfigError(f"{word} needs a value, as in --{name}=VALUE")
            value = left.pop(0) if value is None else value
        elif value is not None and name not in _names(_OPTIONAL):
            raise ConfigError(f"{word}: --{name} takes no value")
        _check(name, value, found)
        found[name] = value
    return ours, found


def refuse_unknown(words: Sequence[str], ours: Sequence[str], takes: str) -> None:
    """Raise for words that neither parser accepted.

    Args:
        words: the words left over.
        ours: our own options, for the suggestion.
        takes: which arguments the command takes, in words.
    """
    for word in words:
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}: {takes}")
        if word.startswith("-a"):
            raise ConfigError(f"{word}: the task numbers of an array follow from its table; use --array TABLE")
        name = word.partition("=")[0]
        known = [*ours, *(f"--{name}" for name in _KNOWN if name not in _REFUSED)]
        raise ConfigError(unknown("option", name, known))


def check_signal(options: Options) -> None:
    """Raise if the ranks would not get the signal before the time limit, or as soon as the job starts."""
    limit, given = time_limit(options.get("time") or ""), options.get("signal") or ""
    batch_script, _, signal = given.rpartition(":")
    if "B" in batch_script:
        raise ConfigError(
            f"--signal={given} warns the batch script, and the ranks have to know; write --signal={signal}"
        )
    seconds = signal.partition("@")[2] or "60"
    if limit is None or not signal or not seconds.isdecimal():
        return
    needed = int(seconds) + _RESOLUTION
    if limit <= needed:
        raise ConfigError(
            f"--signal={signal} with --time={options['time']}: Slurm sends it {seconds} s before the limit, or up to "
            f"a minute earlier, so a job of {limit} s would be stopped as it starts; give a --time of more than "
            f"{-(-needed // 60)} minutes, or a later signal (--signal=USR1@SECONDS)"
        )


def time_limit(text: str) -> int | None:
    """Seconds in what `--time` takes; None for no limit, and for what is no time.

    >>> time_limit("30"), time_limit("1:30"), time_limit("2:00:00"), time_limit("1-12"), time_limit("UNLIMITED")
    (1800, 90, 7200, 129600, None)
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    # Minutes come first, unless there are three parts or days before.
    units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
    seconds = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return seconds + 86400 * int(days or 0) or None  # 0 is no limit


def words_of(options: Options) -> list[str]:
    """Options as written on a command line and, quoted for a shell, in a batch script.

    >>> words_of({"nodes": "2", "exclusive": None})
    ['--nodes=2', '--exclusive']
    """
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    for word in words:
        if "\n" in word or "\\" in word:
            raise ConfigError(f"{word!r}: sbatch cannot read a line break or a backslash here; choose other names")
    return words


def _read(word: str) -> tuple[str | None, str | None]:
    """Long name and value in a word, None for what is absent."""
    if word.startswith("--"):
        name, equals, value = word.removeprefix("--").partition("=")
        return (name if name in _KNOWN else None), (value if equals else None)
    if len(word) > 1 and word[0] == "-" and word[1] in _LETTERS:
        return _LETTERS[word[1]], word[2:] or None
    return None, None


def _check(name: str, value: str | None, before: Options) -> None:
    if name in _REFUSED:
        raise ConfigError(f"--{name} cannot be given to submit: {_REFUSED[name]}")
    if name in before:
        raise ConfigError(f"--{name} is given twice, as {before[name]!r} and {value!r}; give it once")

"""Command-line arguments that several commands share."""

import argparse
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pflmpi.errors import CheckpointError, ConfigError, show
from pflmpi.machine import expand_path
from pflmpi.text import for_shell

if TYPE_CHECKING:
    from pflmpi.analysis.checkpoint import Checkpoint
    from pflmpi.analysis.run import Run


def parse_path(text: str) -> Path:
    """A path with `~` and `$NAME` expanded; parsers of commands use it for `type=Path`."""
    try:
        return expand_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_folder(text: str) -> Path:
    """A folder; an empty name, as of an unset variable, is refused, because it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is expected, and '' found")
    return parse_path(text)


def parse_clients(text: str) -> list[int]:
    """Client ids in a list such as 7,9."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"ids of clients such as 7,9 are expected, and {text!r} found")
    return [int(word) for word in text.split(",")]


def split_words(option: str, text: str) -> list[str]:
    """Split the value of an option into words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} cannot be read as words: {error}; close the quotes") from error


def add_overrides(parser: argparse.ArgumentParser) -> None:
    text = "override a key of the configuration, such as training.rounds=10; may be given several times"
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)


def add_changed_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--changed-code",
        action="store_true",
        help="go on even if your own Python files have changed since the run started",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else (docs/scripts.md)")


def add_config(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument("config", type=Path, help="a YAML file (its keys: `pflmpi list SECTION`)")


def check_config(path: Path) -> None:
    """Raise `ConfigError` for the folder of a run, and for a pipe or device, which not every rank can read."""
    from pflmpi.store import config_file

    if config_file.is_of_run(path):
        resume, config = f"`pflmpi resume {for_shell(path)}`", path / "config.yaml"
        raise ConfigError(f"{path} is the folder of a run; {resume} continues it, and {config} can be run anew")
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot read {path}: it is no regular file, and every rank has to read it")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a run")


def add_round(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--round", type=int, metavar="N", help="the round of the checkpoint (default: the newest)")
    parser.add_argument(
        "--allow-older",
        action="store_true",
        help="fall back to an older checkpoint if the newest is damaged",
    )


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` for an option that is given and below its minimum."""
    for name, number in least.items():
        if (value := getattr(options, name)) is not None and value < number:
            raise ConfigError(f"--{name} {value}: must be at least {number}")


def add_out(parser: argparse.ArgumentParser, help: str, required: bool = False) -> None:
    """Add --out, the folder that a command writes to."""
    parser.add_argument("--out", type=parse_folder, required=required, metavar="DIR", help=help)


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add --force, for a command that writes a file; see `check_output`."""
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def check_free(path: Path | None, option: str, force: bool) -> None:
    """Raise `ConfigError` if an output file exists, unless `force` allows to overwrite it."""
    if path is not None and path.exists() and not force:
        raise ConfigError(f"{path} is there already; choose another {option}, or overwrite it with --force")


def check_suffix(path: Path, option: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a file whose suffix says another format than the known ones."""
    if path.suffix not in known:
        from pflmpi.registry import format_unknown_name  # imports more than a start needs

        raise ConfigError(f"{option} {path}: {format_unknown_name('suffix', path.suffix or 'none', [*known])}")


def check_output(path: Path | None, option: str, force: bool) -> None:
    """Raise `ConfigError` for an output file in a missing folder or in place of a run's, or as `check_free`.

    Commands call it before any work is done.
    """
    from pflmpi.store.runs import is_file_of_run

    if path is not None and not path.parent.is_dir():
        missing = f"cannot write {path}: No such file or directory"
        raise ConfigError(f"{missing}; make the folder {path.parent}, or choose another {option}")
    if path is not None and is_file_of_run(path):
        raise ConfigError(f"{option} {path}: files of a run have such names; choose another, or another folder")
    check_free(path, option, force)


def open_checkpoint(opened: "Run", options: argparse.Namespace) -> "Checkpoint":
    """The checkpoint that the options of `add_round` choose; raises as `Run.round` and `check_newest` do."""
    if options.round is not None:
        return opened.round(options.round)
    newest, problems = opened.newest()
    check_newest(opened.path, newest.number, problems, options.allow_older)
    return newest


def check_newest(run: Path, round: int, problems: Sequence[str], allow_older: bool) -> None:
    """Raise `CheckpointError` if newer checkpoints than a round are damaged, or warn on stderr with `allow_older`.

    Args:
        round: the newest good checkpoint.
        problems: of newer checkpoints, newest first.
    """
    if not problems:
        return
    from pflmpi.store.names import rounds

    more = f" (and {len(problems) - 1} more: `pflmpi inspect {for_shell(run)} --verify`)" if len(problems) > 1 else ""
    problem = f"round {max(rounds(run))} of {run} cannot be used: {problems[0]}{more}"
    if not allow_older:
        raise CheckpointError(
            f"{problem}; mend that, or take round {round}, the newest good one, with --allow-older or --round {round}"
        )
    show(CheckpointError(f"WARNING: {problem}; this is round {round}"))


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs an experiment on ranks."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes to start, if no launcher has (default: one per GPU, or per core; 1 stays in this process)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks again from the newest checkpoint when one was killed, up to N times (default: 0)",
    )
    display = parser.add_mutually_exclusive_group()
    display.add_argument("--quiet", action="store_true", help="no progress, only the result")
    display.add_argument("--bar", action="store_true", help="a progress bar even where mpirun hides the terminal")
    # For `pflmpi.run`: files for errors and rounds, one line each, and a stop after the round when it closes our stdin.
    parser.add_argument("--error-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-at-eof", action="store_true", help=argparse.SUPPRESS)
    # For the ranks that this command starts: the folder of the run, of which it has told the user.
    parser.add_argument("--announced", type=Path, help=argparse.SUPPRESS)


def add_take_over(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over a run that another process is writing; that process stops at its next round",
    )


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the choice among the cells of a table."""
    parser.add_argument("--seeds", type=int, metavar="N", help="only the first N seeds of the table")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only cells whose ROW/COLUMN matches, such as 'FedAvg/*'; may be given several times",
    )


def add_failed_cells(parser: argparse.ArgumentParser) -> None:
    """Add the options for cells of a table that were started and are not done."""
    parser.add_argument(
        "--failed", action="store_true", help="only cells that were started, and are neither done nor running"
    )
    anew = "start cells anew that cannot continue, as when the table was corrected; their runs are kept beside them"
    parser.add_argument("--anew", action="store_true", help=anew)


def add_extrapolation(parser: argparse.ArgumentParser) -> None:
    """Add --to, the number of ranks to extrapolate to."""
    parser.add_argument(
        "--to",
        type=int,
        metavar="RANKS",
        help="extrapolate a scaling experiment to this many ranks, by the serial fraction fitted to it",
    )


def words_of_overrides(options: argparse.Namespace) -> list[str]:
    """Arguments that give another command the same overrides."""
    return [word for text in options.overrides for word in ("-s", text)]


def words_of_changed_code(options: argparse.Namespace) -> list[str]:
    """Arguments that give another command the same --changed-code."""
    return ["--changed-code"] if options.changed_code else []


def words_of_cells(table: Path, out: Path | None, options: argparse.Namespace) -> list[str]:
    """Arguments that give another command the same cells of a table, with the same overrides.

    Args:
        out: folder of the runs; None for the default.
    """
    folder = [] if out is None else ["--out", str(out)]
    seeds = [] if options.seeds is None else ["--seeds", str(options.seeds)]
    only = [word for pattern in options.only for word in ("--only", pattern)]
    return [str(table), *folder, *seeds, *only, *words_of_overrides(options)]

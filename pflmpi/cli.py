"""The command line: the parser of all commands, and where errors become exit codes."""

import argparse
import logging
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pflmpi import __version__, arguments, early_signals, limits, outside, terminal
from pflmpi.cluster.batch_script import refuse_unknown
from pflmpi.commands.completion import complete
from pflmpi.errors import ConfigError, PflmpiError, RunError, UserError, explained, show
from pflmpi.text import first_line, printable

# A command is a file in `commands`. The first line of its docstring is its help, the commands in the docstring are its
# examples, `add_arguments` adds its arguments, and `run` returns its exit code. Slow imports, such as torch, are in
# `run`, so that `--help` is quick.
_GROUPS = {
    "run": ("examples", "docs", "list", "data", "run", "resume", "fork", "contribution", "prune", "sweep", "search"),
    "look": ("inspect", "watch", "compare", "bisect", "report", "table", "export", "evaluate", "probe"),
    "cluster": ("plan", "doctor", "submit", "status", "cancel", "scale"),
}
_EXIT_CODES = (
    "exit codes: 0 done; 1 a run of a sweep or of a scaling experiment failed, or ended with other bits, the doctor "
    "found a problem, a plan does not fit, two runs differ, or a report left a run out; 2 wrong input, nothing was "
    "started; 3 a fault during the run, resume it; 75 stopped after a complete round, on a signal or before a time "
    "limit, resume it; 130 interrupted (Ctrl-C), resume it from the newest checkpoint"
)
_MAY_BE_MISSING = {  # library -> what to do without it
    **dict.fromkeys(("torch", "torchvision", "pydantic"), "report, inspect and export do without torch"),
    **dict.fromkeys(("pandas", "pyarrow"), "`pip install 'pflmpi[analysis]'` brings it"),
}


class _Help(argparse.HelpFormatter):
    """Help that does not wrap examples, and breaks no option at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            [line] if not line or line.startswith("  ") else textwrap.wrap(line, width, break_on_hyphens=False)
            for line in text.splitlines()
        )
        return "\n".join(indent + part for wrapped in lines for part in wrapped)


class _Printable(logging.Formatter):
    """Escapes control characters in messages; see `text.printable`."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def parser(command: str = "") -> argparse.ArgumentParser:
    """Make the parser of the command line; given the name of a command, with that command alone."""
    names = [name for names in _GROUPS.values() for name in names]
    modules = {name: import_module(f"pflmpi.commands.{name}") for name in ([command] if command in names else names)}
    summaries = {name: _summary(module) for name, module in modules.items()}
    top = argparse.ArgumentParser(
        prog="pflmpi",
        usage="pflmpi [-h] [--version] COMMAND ...",
        description="Personalised federated learning on clusters: alone, or under mpirun, torchrun or srun.",
        epilog=_epilog(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pflmpi {__version__}")
    commands = top.add_subparsers(
        prog="pflmpi", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for name, module in modules.items():
        subparser = commands.add_parser(name, description=summaries[name], formatter_class=_Help)
        subparser.set_defaults(function=module.run, parser=subparser, log_level=logging.WARNING)
        subparser.register("type", Path, arguments.parse_path)
        module.add_arguments(subparser)
        subparser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
        subparser.epilog = "\n\n".join(filter(None, (subparser.epilog, _examples(module))))
    return top


def _summary(module: ModuleType) -> str:
    """The first line of the docstring in the form of argparse's help: lower case, without a full stop."""
    line = (module.__doc__ or module.__name__).splitlines()[0].rstrip(".")
    return line[0].lower() + line[1:]


def _examples(module: ModuleType) -> str:
    """The commands in the docstring as examples of the help."""
    lines = [f"  {line}" for line in (module.__doc__ or "").splitlines() if line.startswith("pflmpi ")]
    return "\n".join(["examples:" if len(lines) > 1 else "example:", *lines])


def _epilog(summaries: Mapping[str, str]) -> str:
    """The commands in groups, and the exit codes."""
    width = shutil.get_terminal_size().columns - 2
    lines = []
    for group, names in _GROUPS.items():
        lines.append(f"{group}:")
        for name in filter(summaries.__contains__, names):
            lines += textwrap.wrap(summaries[name], width, initial_indent=f"  {name:<13}", subsequent_indent=15 * " ")
    return "\n".join([*lines, "", *textwrap.wrap(_EXIT_CODES, width)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:
        terminal.outlive_readers()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None and words[:1] in (["run"], ["resume"]):
            if low := limits.check_file_limit():
                raise ConfigError(low)
            early_signals.watch(os.environ)  # before what takes seconds to import
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; later `runtime.threads` sets the number
        command_line = parser(*words[:1])
    except (UserError, OSError, RuntimeError, MemoryError) as caught:
        error = explained(caught)
        show(error, "--debug" in words)
        return _exit_code(error)
    if "_ARGCOMPLETE" in os.environ:
        complete(command_line)
    options = _parse(command_line, words)
    logging.basicConfig(level=logging.DEBUG if options.debug else options.log_level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Printable("pflmpi: %(message)s"))
    try:
        _check_folder()
        _check(words)
        refuse_unknown(options.unknown, options.command)
        with outside.as_config_error():
            code: int = options.function(options)
        if code == 0 and (problem := terminal.output_problem()):
            raise RunError(f"the output could not be written: {problem}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as caught:
        error = _explain(caught, options.command)
        show(error, options.debug, file=getattr(options, "error_file", None))
        return _exit_code(error)
    return code


def _exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, PflmpiError) else RunError.exit_code


def _parse(top: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse the command line, with three fields more: all `words`, those after -- for `sbatch`, and `unknown` ones."""
    end = words.index("--") if words[:1] in (["submit"], ["scale"]) and "--" in words else len(words)
    options, unknown = top.parse_known_args(words[:end])
    options.words, options.unknown, options.sbatch = words, unknown, words[end + 1 :]
    submits = options.command == "submit" or getattr(options, "submit", False)
    if unknown and not submits:  # `refuse_unknown` explains those that may be meant for sbatch
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _check(words: Sequence[str]) -> None:
    """Raise `ConfigError` for an argument that is no text, such as a file name in Latin-1."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {word!a} is no text in UTF-8; rename the file, or type it anew") from None


def _check_folder() -> None:
    """Raise `ConfigError` if the current folder was deleted, in which torch cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted; change to another with cd") from None


def _explain(error: Exception, command: str) -> Exception:
    """Turn an error that the user can do something about into one that says so; return others unchanged."""
    if isinstance(error, ModuleNotFoundError) and error.name in _MAY_BE_MISSING:
        problem = f"{command} needs {error.name}, which is not installed"
        return UserError(f"{problem}; {_MAY_BE_MISSING[error.name]}")
    if isinstance(error, MemoryError):
        problem = f"{command} needs more memory than this process may have ({first_line(error)})"
        return RunError(f"{problem}; allow it more (ulimit -v, --mem of a job), or give it less to do")
    return explained(error)

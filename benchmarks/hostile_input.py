"""What wrong input comes to: bad values in every key of the schema, and damaged files of every kind.

    python benchmarks/hostile_input.py [--count 5000] [--files 300] [--seed 0] [--out FILE.md] [--show]

Each value and file goes through the command line (`pflmpi.cli.main`, one rank), as a user would give it: a value by
`-s`, a file in its place. It must be refused with exit code 2 and one message, or be taken and work. What runs longer
than `--limit` seconds is stopped: inside the rounds it is at work, before them it hangs. The work is done by child
processes with 8 GiB of memory, so that a crash is one more outcome; the same seed gives the same cases.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

GOOD = ("refused", "taken", "at work", "diverged")
CRASHED = "crash"
_FILES_TAKE = 12  # times as long as values: the figures of a report are drawn


class TimeIsUp(BaseException):
    """Raised in the middle of whatever runs too long."""


def main() -> int:
    """Try all cases in child processes, and print the counts; 1 if any outcome is bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, metavar="N", help="bad values")
    parser.add_argument("--files", type=int, default=300, metavar="N", help="bad files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=5.0, metavar="SECONDS", help="of one value; a file has 12 times as long"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the counts as Markdown")
    parser.add_argument("--show", action="store_true", help="every case, not only the bad ones")
    parser.add_argument("--worker", type=int, nargs=2, metavar=("FROM", "TO"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked, *asked.worker)
        return 0
    began, found = time.monotonic(), []
    total = asked.count + asked.files
    while len(found) < total:
        found += list(_child(asked, len(found), total))
    bad = [one for one in found if one["outcome"] not in GOOD]
    for one in found if asked.show else bad:
        print(f"{one['outcome']}: {one['case']}: {one['message']}")
    text = _table(found, asked, time.monotonic() - began)
    print(text)
    if asked.out:
        asked.out.write_text(text)
    return bool(bad)


def _child(asked: argparse.Namespace, start: int, total: int) -> Iterator[dict[str, str]]:
    """Yield the outcomes of a child process; one that dies yields its last case as a crash."""
    words = [f"--{name}={getattr(asked, name)}" for name in ("count", "files", "seed", "limit")]
    command = [sys.executable, __file__, *words, "--worker", str(start), str(total)]
    case = "start of the child"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            case = found["case"]
            if "outcome" in found:
                yield found
                case = ""
    if case:
        yield {"case": case, "kind": "value" if start < asked.count else "file", "outcome": CRASHED,
               "message": f"the process ended with {process.returncode}"}  # fmt: skip


def work(asked: argparse.Namespace, first: int, last: int) -> None:
    """Try some cases, and write each before and after it is tried."""
    import hostile_cases

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    report = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ.update(COLUMNS="120", TMPDIR=name, HOME=name)
        tempfile.tempdir = name
        cases = hostile_cases.Cases(Path(name), asked.count)
        for number in range(first, last):
            rng = random.Random(f"{asked.seed}/{number}")
            kind = "value" if number < asked.count else "file"
            case, words = cases.value(number, rng) if kind == "value" else cases.file(number - asked.count, rng)
            report.write(json.dumps({"case": case}) + "\n")
            outcome, message = attempt(words, asked.limit * (1 if kind == "value" else _FILES_TAKE))
            report.write(json.dumps({"case": case, "kind": kind, "outcome": outcome, "message": message[:1500]}) + "\n")
            cases.clean()
            if outcome == "hang":
                return  # whatever was interrupted may be half done


def attempt(words: Sequence[str], limit: float) -> tuple[str, str]:
    """What a command comes to, and what it says."""
    from pflmpi.cli import main as pflmpi

    def stop(_: int, frame: object) -> None:
        raise TimeIsUp

    faulthandler.dump_traceback_later(limit + 60, exit=True)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    code: int | str | None = None
    where = ""
    with _captured() as read:
        try:
            code = pflmpi(list(words))
        except SystemExit as ended:
            code = ended.code
        except TimeIsUp as ended:
            where = "".join(traceback.format_tb(ended.__traceback__))
        except BaseException as error:
            where = f"uncaught {error!r}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        text = read()
    lines = [line for line in text.splitlines() if line.startswith("pflmpi: ") or "error:" in line]
    outcome = _judged(code, where, text, lines)
    return outcome, lines[-1] if lines and outcome != "traceback" else f"{text[-900:]} {where[-300:]}"


def _judged(code: int | str | None, where: str, text: str, lines: Sequence[str]) -> str:
    if "internal error" in text:
        return "internal error"
    if "Traceback" in text or where.startswith("uncaught"):
        return "traceback"
    if where:
        return "at work" if "runtime/rounds.py" in where else "hang"
    if code in (0, 1):
        return "taken"
    errors = [line for line in lines if "passed over" not in line and "warning" not in line]
    if code == 2:
        return "refused" if errors and len(errors[-1]) < 2000 else "no message"
    if code == 3:
        return "diverged" if "diverged" in text else "fault"
    return f"exit {code}"


@contextlib.contextmanager
def _captured() -> Iterator[object]:
    """Yield a function that returns what was written to stdout and stderr, also past Python."""
    streams, kept = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), errors="backslashreplace", write_through=True
        )

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            sys.stdout, sys.stderr = streams
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def _table(found: Sequence[dict[str, str]], asked: argparse.Namespace, seconds: float) -> str:
    names = [*GOOD, *sorted({one["outcome"] for one in found} - set(GOOD))]
    names += [name for name in ("internal error", "traceback", "hang", CRASHED) if name not in names]
    lines = [f"| of | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kind in ("value", "file"):
        counts = Counter(one["outcome"] for one in found if one["kind"] == kind)
        lines.append(f"| {sum(counts.values())} bad {kind}s | {' | '.join(str(counts[name]) for name in names)} |")
    command = f"python benchmarks/hostile_input.py --count {asked.count} --files {asked.files} --seed {asked.seed}"
    return "\n".join([f"`{command}`, {seconds:.0f} s:", "", *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

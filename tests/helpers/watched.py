"""Runs commands on a stranger's files, each in a fork with limits, and notes what it opened and wrote.

    python -P watched.py FILE       FILE: JSON, a list of [words, folder of the run, other folders to watch]

prints a line of JSON for each: exit code, output, what was opened and what was written, as the kernel saw it (inotify)
and as Python did (an audit hook).
"""

import ctypes
import ctypes.util
import importlib
import io
import json
import os
import resource
import signal
import struct
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

SECONDS = int(os.environ.get("WATCHED_SECONDS", "60"))
MEMORY = 1500 << 20  # bytes of address space beyond what is mapped at the start; torch needs some for threads

_LIBC = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
_OPEN, _MODIFY, _MOVED, _CREATE, _DELETE = 0x20, 0x2, 0xC0, 0x100, 0x200
_EVENT = struct.Struct("iIII")


class Watch:
    """What happens in some folders (inotify)."""

    def __init__(self, folders: list[Path]) -> None:
        self._descriptor = _LIBC.inotify_init1(os.O_NONBLOCK)
        self._names = {}
        for folder in folders:
            mask = _OPEN | _MODIFY | _MOVED | _CREATE | _DELETE
            number = _LIBC.inotify_add_watch(self._descriptor, os.fsencode(folder), mask)
            self._names[number] = folder

    def seen(self) -> tuple[list[str], list[str]]:
        """The files that were opened, and those that were written, made or deleted."""
        opened, written = set(), set()
        try:
            content = os.read(self._descriptor, 1 << 22)
        except BlockingIOError:
            content = b""
        while content:
            number, mask, _, length = _EVENT.unpack_from(content)
            name = content[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            content = content[_EVENT.size + length :]
            path = str(self._names[number] / os.fsdecode(name)) if name else ""
            if mask & _OPEN and path:
                opened.add(path)
            if mask & (_MODIFY | _MOVED | _CREATE | _DELETE):
                written.add(path)
        os.close(self._descriptor)
        return sorted(opened), sorted(written)


def main():
    cases = json.loads(Path(sys.argv[1]).read_text())
    sys.dont_write_bytecode = True  # so that commands write nothing but what is theirs
    import pflmpi.cli

    pflmpi.cli.parser()
    if any(words[0] in ("evaluate", "plan", "resume") for words, _ in cases):  # not within the limits of the first case
        import torch  # noqa: F401

        import pflmpi.config.load
        import pflmpi.experiment.run
    imported: set[str] = set()
    for words, folders in cases:
        for name in sorted(imported - sys.modules.keys()):
            importlib.import_module(name)  # once for all cases that follow
        result, imported = _case(words, [Path(folder) for folder in folders])
        print(json.dumps(result), flush=True)


def _case(words, folders):
    watch = Watch([folder for folder in folders if folder.is_dir()])
    with ExitStack() as stack:
        out, err, hook, modules = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = _command(words, hook.fileno())
            os.write(modules.fileno(), "\0".join(_installed()).encode())
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [_text(file) for file in (out, err, hook, modules)]
    opened, written = watch.seen()
    python, imported = ({*text.split("\0")} - {""} for text in texts[2:])
    report = {"out": texts[0], "err": texts[1], "opened": opened, "written": written, "python": sorted(python)}
    return {"code": status, **report}, imported


def _installed():
    """The modules of this process that are installed: none that a run names."""
    places = (sys.prefix, sys.base_prefix, os.path.dirname(sys.modules["pflmpi"].__file__))
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file.startswith(places)]


def _text(file):
    file.seek(0)
    return str(file.read().decode(errors="surrogateescape"))


def _command(words, hook):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)  # ends a process that waits inside of a library, too
    data = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))  # not of addresses: drawing reserves many

    def audit(event, arguments):
        if event in _WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            os.write(hook, f"{event} {arguments[0]}\0".encode(errors="surrogateescape"))

    sys.addaudithook(audit)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", errors="backslashreplace", write_through=True)

    from pflmpi.cli import main as pflmpi

    try:
        code = pflmpi(words)
    except SystemExit as ended:
        code = int(ended.code or 0) if not isinstance(ended.code, str) else 99
    sys.stdout.flush()
    sys.stderr.flush()
    return code


_WRITES = ("os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "os.utime")


if __name__ == "__main__":
    main()

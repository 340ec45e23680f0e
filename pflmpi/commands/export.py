"""`pflmpi export`: the state of a client or the server as a plain file for other programs."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pflmpi.analysis.run import Round, open_run
from pflmpi.analysis.state_dict import client_state, server_state
from pflmpi.errors import ConfigError
from pflmpi.registry import unknown
from pflmpi.store import atomic
from pflmpi.text import size

State = dict[str, np.ndarray]


def export(options: argparse.Namespace) -> None:
    """Write the state that the options ask for, and print what it is.

    Raises:
        UserError: no such run, round, client or part; a suffix that is not known; a file that is in the way.
    """
    write = _writer(options.out)
    if options.out.exists() and not options.force:
        raise ConfigError(f"{options.out} is there already; choose another -o, or overwrite it with --force")
    run = open_run(options.run)
    round = run.round(options.round)
    if options.server:
        who, state = "server", server_state(round, options.leaf)
    else:
        who, state = f"client {options.client}", client_state(run, round, options.client, options.leaf)
    _save(options.out, state, write)
    total = size(sum(array.nbytes for array in state.values()))
    part = "" if options.leaf is None else f", {options.leaf}"
    print(f"{options.out}: {who}{part} after round {round.number} of {run.name}, {len(state)} arrays, {total}")
    if not options.server and options.leaf is None:
        print(_score(round, options.client), end="")


def _score(round: Round, client: int) -> str:
    if "correct" not in round.metrics or not round.metrics["total"][client]:
        return ""
    correct, total = int(round.metrics["correct"][client]), int(round.metrics["total"][client])
    return f"in the run it was right for {correct} of the client's {total} test samples\n"


def _writer(path: Path) -> Callable[[BinaryIO, State], None]:
    """Return what writes files of a path's suffix; a library that is missing is told before anything is read."""
    if path.suffix not in _WRITERS:
        raise ConfigError(f"-o {path}: {unknown('suffix', path.suffix or 'none', list(_WRITERS))}")
    library, install, write = _WRITERS[path.suffix]
    try:
        module = import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"-o {path}: {path.suffix} files need a library that is not installed; `pip install {install}`, "
            "or choose .npz, which needs none"
        ) from error
    return lambda file, state: write(module, file, state)


def _save(path: Path, state: State, write: Callable[[BinaryIO, State], None]) -> None:
    try:
        with atomic.replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
            write(file, state)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another -o") from error


def _pt(torch: Any, file: BinaryIO, state: State) -> None:
    torch.save({name: torch.tensor(array) for name, array in state.items()}, file)


def _safetensors(library: Any, file: BinaryIO, state: State) -> None:
    file.write(library.save({name: np.array(array, order="C") for name, array in state.items()}))


def _npz(numpy: Any, file: BinaryIO, state: State) -> None:
    numpy.savez(file, **state)


_WRITERS: dict[str, tuple[str, str, Callable[[Any, BinaryIO, State], None]]] = {
    ".pt": ("torch", "torch", _pt),
    ".safetensors": ("safetensors.numpy", "safetensors", _safetensors),
    ".npz": ("numpy", "numpy", _npz),
}

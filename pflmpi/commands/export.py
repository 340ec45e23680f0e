"""Write a client's model, the server's state, a whole checkpoint or a table of the clients for other programs.

pflmpi export runs/mine --client 7 -o client7.pt
pflmpi export runs/mine --table clients.csv
pflmpi export runs/mine --all -o one.h5
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pflmpi import arguments, atomic
from pflmpi.errors import ConfigError
from pflmpi.text import format_bytes, format_ranges, pluralize, printable

if TYPE_CHECKING:
    import numpy as np

    from pflmpi.analysis.checkpoint import Checkpoint

State = dict[str, "np.ndarray"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--client", type=int, metavar="K", help="the model that this client predicts with")
    whose.add_argument("--server", action="store_true", help="everything that the server keeps")
    whose.add_argument("--all", action="store_true", help="the whole checkpoint, as one HDF5 file that needs no other")
    whose.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="a line for each client and round that has a checkpoint: accuracy, losses, samples, bytes, diagnostics; "
        ".csv or .parquet",
    )
    arguments.add_round(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="what to write: .pt (torch), .safetensors or .npz (NumPy); with --all .h5",
    )
    parser.add_argument(
        "--leaf",
        metavar="PATH",
        help="instead only this part of what the client or the server keeps, such as model or model/head; "
        "a dot for all of it (`pflmpi inspect RUN` lists the paths)",
    )
    parser.add_argument("--compress", action="store_true", help="with --all: the clients' arrays with gzip")
    arguments.add_force(parser)


def run(options: argparse.Namespace) -> int:
    from pflmpi.analysis.model import read_client_state_dict, read_server_state_dict
    from pflmpi.analysis.run import read_run

    if options.table is not None:
        return _run_table(options)
    if options.out is None:
        raise ConfigError("export needs -o FILE, the file to write")
    if options.all:
        return _run_all(options)
    if options.compress:
        raise ConfigError("--compress goes with --all; leave it out")
    write = _writer(options.out)
    arguments.check_output(options.out, "-o", options.force)
    opened = read_run(options.run)
    round = arguments.open_checkpoint(opened, options)
    if options.server:
        who, state = "server", read_server_state_dict(round, options.leaf)
    else:
        who, state = f"client {options.client}", read_client_state_dict(round, options.client, options.leaf)
    _save(options.out, state, write)
    total = format_bytes(sum(array.nbytes for array in state.values()))
    part = "" if options.leaf is None else f", {options.leaf}"
    content = f"{who}{part} after round {round.number} of {opened.name}"
    print(printable(f"{options.out}: {content}, {len(state)} arrays, {total}"))
    if not options.server and options.leaf is None:
        print(_score(round, options.client), end="")
    return 0


def _run_all(options: argparse.Namespace) -> int:
    from pflmpi.analysis.run import read_run
    from pflmpi.commands.progress import bar
    from pflmpi.store import one_file

    path = options.out
    if path.suffix != ".h5":
        raise ConfigError(f"-o {path}: --all writes HDF5; choose a name that ends in .h5")
    if options.leaf is not None:
        raise ConfigError(f"--leaf {options.leaf} cannot go with --all, which writes everything; leave one of them out")
    arguments.check_output(options.out, "-o", options.force)
    opened = read_run(options.run)
    round = arguments.open_checkpoint(opened, options)
    with atomic.explain_write_error(path, "choose another -o"), bar("clients") as update:
        one_file.write(path, opened.path, round.number, options.compress, update)
    content = f"round {round.number} of {opened.name}, {pluralize(round.num_clients, 'client')}"
    print(printable(f"{path}: {content}, {format_bytes(path.stat().st_size)}; it needs no other file"))
    return 0


def _run_table(options: argparse.Namespace) -> int:
    from pflmpi.analysis.run import read_run

    path = options.table
    arguments.check_suffix(path, "--table", _TABLES)
    others = {
        "-o": options.out is not None,
        "--leaf": options.leaf is not None,
        "--compress": options.compress,
        "--allow-older": options.allow_older,
    }
    for name, is_given in others.items():
        if is_given:
            raise ConfigError(f"{name} cannot go with --table; leave one of them out")
    library, write = _TABLES[path.suffix]
    import_module(library)  # before the table is made
    arguments.check_output(path, "--table", options.force)
    opened = read_run(options.run)
    table = opened.clients_table(None if options.round is None else [options.round])
    _save(path, table, write)
    rounds = format_ranges(set(table["round"]))
    content = f"{pluralize(len(table), 'line')} of {opened.name}, of the rounds {rounds}"
    print(printable(f"{path}: {content}, {len(table.columns)} columns"))
    return 0


def _score(round: "Checkpoint", client: int) -> str:
    """A line with the test result of a client in the run; "" if there is none."""
    if "correct" not in round.metrics or not round.metrics["total"][client]:
        return ""
    correct, total = int(round.metrics["correct"][client]), int(round.metrics["total"][client])
    return f"in the run it was right for {correct} of the client's {total} test samples\n"


def _writer(path: Path) -> Callable[[BinaryIO, State], None]:
    """The function that writes files with the suffix of `path`; raises `ConfigError` if its library is missing."""
    arguments.check_suffix(path, "-o", _WRITERS)
    library, install, write = _WRITERS[path.suffix]
    try:
        module = import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"-o {path}: {path.suffix} files need a library that is not installed; `pip install {install}`, "
            "or choose .npz, which needs none"
        ) from error
    return lambda file, state: write(module, file, state)


def _save(path: Path, content: Any, write: Callable[[BinaryIO, Any], None]) -> None:
    """Write a file that appears complete or not at all."""
    with (
        atomic.explain_write_error(path, "choose another file"),
        atomic.replacing(path) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        write(file, content)


def _pt(torch: Any, file: BinaryIO, state: State) -> None:
    torch.save({name: torch.tensor(array) for name, array in state.items()}, file)


def _safetensors(library: Any, file: BinaryIO, state: State) -> None:
    file.write(library.save({name: array.copy(order="C") for name, array in state.items()}))


def _npz(numpy: Any, file: BinaryIO, state: State) -> None:
    numpy.savez(file, **state)


_TABLES: dict[str, tuple[str, Callable[[BinaryIO, Any], None]]] = {
    ".csv": ("pandas", lambda file, table: table.to_csv(file, index=False)),
    ".parquet": ("pyarrow", lambda file, table: table.to_parquet(file, index=False)),
}
_WRITERS: dict[str, tuple[str, str, Callable[[Any, BinaryIO, State], None]]] = {
    ".pt": ("torch", "torch", _pt),
    ".safetensors": ("safetensors.numpy", "safetensors", _safetensors),
    ".npz": ("numpy", "numpy", _npz),
}

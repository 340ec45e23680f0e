"""Delete checkpoints of a run that is not running, and say how much that frees.

pflmpi prune runs/mine --every 10 --keep 3 --dry-run
"""

import argparse

from pflmpi import arguments, atomic
from pflmpi.text import format_bytes, format_ranges, pluralize, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run(parser)
    parser.add_argument("--every", type=int, metavar="N", help="keep the checkpoints of the rounds 0, N, 2N, ...")
    parser.add_argument(
        "--keep", type=int, default=1, metavar="M", help="keep the newest M checkpoints, at least 1 (default: 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="delete nothing, only say what would be freed")


def run(options: argparse.Namespace) -> int:
    from pflmpi.analysis.run import read_run
    from pflmpi.store import pruning, run_lock

    arguments.check_least(options, every=1, keep=1)
    opened = read_run(options.run)
    lock = None if options.dry_run else run_lock.take(opened.path, {}, False)
    try:
        kept, files = pruning.choose_files_to_prune(opened.path, options.every, options.keep)
        freed = sum(file.lstat().st_size for file in files)
        if lock is not None:
            with atomic.explain_write_error(f"the run folder {opened.path}", "leave the run as it is"):
                pruning.delete(opened.path, files)
    finally:
        if lock is not None:
            lock.release()
    verb = "would be freed" if options.dry_run else "freed"
    freed_text = f"{pluralize(len(files), 'file')}, {format_bytes(freed)} {verb}"
    print(printable(f"{options.run}: {freed_text}; checkpoints {format_ranges(kept)} stay"))
    return 0

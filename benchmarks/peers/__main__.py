"""The same work by pflmpi, Flower, Apple's pfl, fluke, PFLlib and a bare loop: seconds a round, memory, start.

    python benchmarks/peers --folder DIR [--works cnn mlp ...] [--peers bare pflmpi ...] [--passes 3]
                            [--pfllib CHECKOUT] [--out FILE.md]

FedAvg on random images that all of them read from one file, and FedGH where they have it; what is done is in `work.py`.
Each simulator runs as its documentation says, in an environment of its own below DIR, which is made when it is not
there, with the PyTorch of this one; on all cores: a process for each (pflmpi, pfl, Flower, the bare loop), or one
process with as many threads (fluke, PFLlib). PFLlib is no package: `--pfllib` names a checkout of its repository,
without which it is left out.

The passes are interleaved: every simulator once, then all again. Seconds a round: the median of the rounds of a pass
but the first, the best of the passes. First round: from the start of the command, the best of the passes. Memory: all
processes together, shared pages counted once, the most of the passes. Nothing is tested and no checkpoint written.
`picture.py` draws the tables.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import environments
import measuring
import work


def main() -> int:
    """Print the tables; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in environments.PEERS]
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="environments, data and logs")
    parser.add_argument(
        "--works", nargs="+", choices=work.WORKS, default=[name for name in work.WORKS if name not in work.TINY]
    )
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--passes", type=int, default=3, metavar="N")
    parser.add_argument("--pfllib", type=Path, metavar="CHECKOUT")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of one run")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="the tables")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    peers = [
        peer for peer in environments.PEERS if peer.name in options.peers and (peer.name != "pfllib" or options.pfllib)
    ]
    failed, tables = False, []
    for name in options.works:
        able = [peer for peer in peers if work.WORKS[name].algorithm in peer.algorithms]
        seen: dict[str, list[measuring.Measured]] = {peer.name: [] for peer in able}
        for _ in range(options.passes):
            for peer in able:
                try:
                    seen[peer.name].append(one := measure(peer, name, options))
                except RuntimeError as error:
                    failed = True
                    print(error, file=sys.stderr)
                    continue
                print(f"{name} {peer.name}: {statistics.median(one.rounds):.3f} s", file=sys.stderr, flush=True)
        tables.append(table(name, seen))
        print(tables[-1], flush=True)
        if options.out:
            options.out.write_text("\n\n".join(tables) + "\n")
    return int(failed)


def measure(peer: environments.Peer, name: str, options: argparse.Namespace) -> measuring.Measured:
    """One run of one simulator."""
    folder = options.folder.resolve()
    data = folder / f"{name}.npz"
    if not data.exists():
        work.write(work.WORKS[name], data)
    cores, here = len(os.sched_getaffinity(0)), Path(__file__).resolve().parent
    python = environments.python(peer, folder)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores)] if peer.torchrun else []
    words = [python, *start, str(here / f"of_{peer.name}.py"), name, str(data)]
    if peer.name == "pfllib":
        words.append(str(options.pfllib.resolve()))
    return measuring.run(words, here, peer.threads or cores, folder / f"{name}_{peer.name}.log", options.limit)


def table(name: str, seen: dict[str, list[measuring.Measured]]) -> str:
    """What was measured of one work."""
    of = work.WORKS[name]
    best = {peer: min(statistics.median(one.rounds) for one in runs) for peer, runs in seen.items() if runs}
    ours = best.get("pflmpi")
    lines = [
        f"{name}: `{of.algorithm}`, {of.clients} clients with {of.samples} samples of {'x'.join(map(str, of.shape))}, "
        f"{of.cohort} a round, epochs {of.epochs}, batch {of.batch}, `{of.model}`",
        "",
        "| | seconds a round | of pflmpi's | first round ends after, s | memory, MiB |",
        "|---|---|---|---|---|",
    ]
    for peer, runs in seen.items():
        if not runs:
            lines.append(f"| {peer} | failed | | | |")
            continue
        share = f"{best[peer] / ours:.2f}" if ours else ""
        first, memory = min(one.first for one in runs), max(one.memory for one in runs)
        lines.append(f"| {peer} | {best[peer]:.3f} | {share} | {first:.1f} | {memory / 2**20:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

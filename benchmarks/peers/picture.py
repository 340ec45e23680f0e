"""A picture of the tables of a page: `python benchmarks/peers/picture.py results/peers.md docs/images/peers.png`."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

NAMES = {
    "bare": "bare loop",
    "pflmpi": "pflmpi",
    "pfl": "pfl",
    "flower": "Flower",
    "fluke": "fluke",
    "pfllib": "PFLlib",
}
COLOURS = {"bare": "#b0b0b0", "pflmpi": "#1f6fb2"}
OTHERS = "#d9a05b"


def main() -> None:
    """Draw seconds a round of every work, a panel for each."""
    page, picture = map(Path, sys.argv[1:])
    works = read(page.read_text())
    figure, panels = pyplot.subplots(1, len(works), figsize=(2.6 * len(works), 2.5), layout="constrained")
    for panel, (title, seconds) in zip(panels, works.items(), strict=True):
        peers = list(reversed(seconds))
        bars = panel.barh(
            [NAMES[peer] for peer in peers],
            [seconds[peer] for peer in peers],
            color=[COLOURS.get(peer, OTHERS) for peer in peers],
        )
        panel.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        panel.set_title(title, fontsize=9)
        panel.margins(x=0.2)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("seconds a round", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def read(text: str) -> dict[str, dict[str, float]]:
    """Seconds a round by work and simulator, from the tables that `__main__.py` writes."""
    works: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if "clients with" in line:
            mine = works.setdefault(line.partition(":")[0].strip("*` "), {})
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[0] in NAMES and len(cells) > 1 and cells[1] != "failed":
            mine[cells[0]] = float(cells[1])
    return works


if __name__ == "__main__":
    main()

"""A picture of the tables that `--out` wrote: `python benchmarks/peers/picture.py FILE.md docs/images/peers.png`."""

import sys
from pathlib import Path

import vl_convert

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
    panels = [panel(title, seconds) for title, seconds in read(page.read_text()).items()]
    chart = {"hconcat": panels, "background": "white", "config": {"view": {"stroke": None}}}
    picture.write_bytes(vl_convert.vegalite_to_png(chart, scale=1.5))


def panel(title: str, seconds: dict[str, float]) -> dict[str, object]:
    """Bars of one work, with their values."""
    rows = [
        {"name": NAMES[peer], "seconds": value, "colour": COLOURS.get(peer, OTHERS)} for peer, value in seconds.items()
    ]
    x = {
        "field": "seconds",
        "type": "quantitative",
        "title": "seconds a round",
        "axis": {"tickCount": 4, "grid": False},
    }
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False}}
    bar = {"mark": "bar", "encoding": {"color": {"field": "colour", "type": "nominal", "scale": None}}}
    value = {"field": "seconds", "type": "quantitative", "format": ".3g"}
    text = {"mark": {"type": "text", "align": "left", "dx": 3}, "encoding": {"text": value}}
    layers = {"layer": [bar, text], "encoding": {"x": x, "y": y}, "data": {"values": rows}}
    return {"title": {"text": title, "fontSize": 11}, "width": 150, "height": 130, **layers}


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

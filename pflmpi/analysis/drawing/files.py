"""A figure as files, and as SVG to put into a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pflmpi.analysis.drawing import svg
from pflmpi.analysis.drawing.figure import drawing
from pflmpi.analysis.drawing.scene import Drawing
from pflmpi.analysis.drawing.sheet import sheet
from pflmpi.analysis.plots import Plot

PICTURES = ("png", "pdf")


@dataclass(frozen=True)
class Drawn:
    """A figure in a folder.

    Attributes:
        svg: its file.
        pictures: further files, where they were asked for.
        inline: an <svg> element for each of its scenes, whose colours follow the page: `currentColor`, --c0, --c1, ...
        drawing: with the legend.
    """

    svg: Path
    pictures: tuple[Path, ...]
    inline: tuple[str, ...]
    drawing: Drawing


def draw(plot: Plot, folder: Path, pictures: Sequence[str] = ()) -> Drawn:
    """Draw a figure once, into folder/NAME.svg (transparent) and .png or .pdf (white ground) where asked.

    Args:
        pictures: some of `PICTURES`; these need matplotlib.
    """
    path = folder / f"{plot.name}.svg"
    drawn = drawing(plot)
    whole = sheet(drawn)
    path.write_text(svg.file(whole), encoding="utf-8")
    others = tuple(path.with_suffix(f".{kind}") for kind in pictures)
    if others:
        from pflmpi.analysis.drawing import picture  # matplotlib takes longer to import than a report to draw

        picture.write(whole, others)
    elements = tuple(
        svg.inline(scene, ". ".join(filter(None, (plot.title, scene.title, plot.caption)))) for scene in drawn.scenes
    )
    return Drawn(path, others, elements, drawn)

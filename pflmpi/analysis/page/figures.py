"""The figures of a page: each drawn into its folder, with its numbers beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from pflmpi.analysis.drawing.rendering import draw
from pflmpi.analysis.page.html import PageFigure
from pflmpi.analysis.plots import Missing, Plot


def draw_figures(
    out: Path,
    pictures: Sequence[str],
    figures: Sequence[Plot | Missing],
    folder: str,
    update: Callable[[int, int], None] = lambda *_: None,
) -> list[PageFigure | Missing]:
    """Draw figures into a folder below that of their page.

    Args:
        out: folder of the page.
        pictures: "png", "pdf" or both, as which every figure is written too.
        update: called with how many are drawn, of how many.
    """
    (out / folder).mkdir(parents=True, exist_ok=True)
    result: list[PageFigure | Missing] = []
    for number, figure in enumerate(figures, 1):
        if isinstance(figure, Missing):
            result.append(figure)
            continue
        (out / folder / f"{figure.name}.csv").write_text(figure.table(), encoding="utf-8")
        result.append(PageFigure(draw(figure, out / folder, pictures), f"{folder}/{figure.name}"))
        update(number, len(figures))
    return result

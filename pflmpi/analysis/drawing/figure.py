"""The drawing of every kind of figure."""

from collections.abc import Sequence
from dataclasses import replace

from pflmpi.analysis.drawing import clouds, curves, dots, matrices, stack, style
from pflmpi.analysis.drawing.frame import Axis, common, frame
from pflmpi.analysis.drawing.scene import Drawing, Scene
from pflmpi.analysis.plots import Clouds, Curves, Dots, Matrices, Multiples, Part, Plot, Stack


def drawing(plot: Plot) -> Drawing:
    """A figure drawn."""
    match plot:
        case Curves(apart=True):
            each = [(curve.label, replace(plot, curves=(curve,))) for curve in plot.curves]
            return replace(_side_by_side(each), keys=())
        case Curves() | Stack():
            return _side_by_side([("", plot)])
        case Multiples():
            return _side_by_side(plot.parts)
        case Matrices():
            return _matrices([("", plot)])
        case Dots():
            x, y = dots.axes(plot)
            drawn = frame(x, y, style.WIDTH, dots.height(plot))
            return Drawing(scenes=(drawn.scene(dots.shapes(plot, drawn)),), keys=dots.keys(plot))
        case Clouds():
            x, y = clouds.axes(plot)
            frames = [(each, frame(x, y, _width(plot.clouds), style.HEIGHT, each.title)) for each in plot.clouds]
            scenes = tuple(drawn.scene(clouds.shapes(plot, cloud, drawn)) for cloud, drawn in frames)
            return Drawing(scenes=scenes, keys=clouds.keys(plot))
    raise AssertionError(f"no drawing for {type(plot).__name__}")


def _side_by_side(parts: Sequence[tuple[str, Part]]) -> Drawing:
    """Figures of one kind on common axes, and one legend."""
    if isinstance(parts[0][1], Matrices):
        return _matrices([(title, part) for title, part in parts if isinstance(part, Matrices)])
    width = _width(parts)
    x, y = (common(axes) for axes in zip(*(_axes(part) for _, part in parts), strict=True))
    scenes, keys = [], {}
    for title, part in parts:
        drawn = frame(x, y, width, style.HEIGHT, title)
        if isinstance(part, Curves):
            scenes.append(drawn.scene(curves.shapes(part, drawn)))
            keys.update({key.label: key for key in curves.keys(part)})
        elif isinstance(part, Stack):
            scenes.append(drawn.scene(stack.shapes(part, drawn), parts=stack.hover(part)))
            keys.update({key.label: key for key in stack.keys(part)})
    return Drawing(scenes=tuple(scenes), keys=tuple(keys.values()))


def _axes(part: Part) -> tuple[Axis, Axis]:
    if isinstance(part, Matrices):
        raise AssertionError("matrices have axes of their own")
    return curves.axes(part) if isinstance(part, Curves) else stack.axes(part)


def _matrices(parts: Sequence[tuple[str, Matrices]]) -> Drawing:
    """Matrices on one scale of colours."""
    width = _width([panel for _, part in parts for panel in part.panels])
    limits = matrices.limits([part for _, part in parts])
    scenes: list[Scene] = []
    keys = {}
    for title, part in parts:
        scenes += matrices.scenes(part, width, limits, title)
        keys.update({key.label: key for key in matrices.keys(part)})
    return Drawing(scenes=tuple(scenes), keys=tuple(keys.values()), scale=matrices.scale(parts[0][1], limits))


def _width(parts: Sequence[object]) -> float:
    return style.WIDTH if len(parts) == 1 else style.NARROW

"""Figures read back from what is drawn: where marks are, in which colours, what is written beside them."""

import html
import re
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import altair
import numpy as np
import pytest
import vl_convert

from pflmpi.analysis.drawing.charts import COLOURS, HEIGHT, INK, NARROW, WIDTH, build_chart
from pflmpi.analysis.drawing.rendering import PICTURES, draw, dump_config, render_svg
from pflmpi.analysis.plots import (
    Bars,
    Cloud,
    Clouds,
    Curve,
    Curves,
    Matrices,
    Multiples,
    Panel,
    Stack,
    downsample,
)

ABOUT = {"name": "a", "title": "A", "caption": "C."}


def curves(*those, **more):
    return Curves(**ABOUT, y_label="accuracy", curves=those, **more)


def matrix(values, **more):
    values = np.array(values, float)
    panel = Panel("", values, range(values.shape[0]), [10 + column for column in range(values.shape[1])])
    words = {"row_label": "client", "column_label": "round", "value_label": "beta"}
    return Matrices(**ABOUT, **words, panels=(panel,), **more)


def marks(plot, kind, **parameters):
    """The items of the marks of a kind, from the scene graph; legends and axes have others."""
    spec = deepcopy(build_chart(plot))
    for parameter in spec.get("params", []):
        parameter["value"] = parameters.get(parameter["name"], parameter.get("value"))
    groups = []

    def walk(node):
        if isinstance(node, list):
            for child in node:
                walk(child)
        elif isinstance(node, dict):
            if node.get("role", "").startswith(("axis", "legend", "title")):
                return
            if node.get("marktype") == kind:
                groups.append(node["items"])
            walk(node.get("items", []))

    walk(vl_convert.vegalite_to_scenegraph(spec)["scenegraph"])
    return [items for items in groups if items]


def texts(drawing):
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawing)


def places_of_numbers(drawing):
    """Where the numbers of axes are: the end of the text's own translation."""
    matches = re.findall(r'<text[^>]*transform="translate\((-?[\d.]+),(-?[\d.]+)\)[^>]*>(-?[\d.]+)</text>', drawing)
    return {float(number): (float(x), float(y)) for x, y, number in matches}


# --- lines


def test_points_of_a_line_are_at_their_values_and_higher_is_up():
    plot = curves(Curve("a", np.array([1, 3, 5]), np.array([0.0, 50, 100])), percent=True, zero=True)
    (line,) = marks(plot, "line")
    assert [item["x"] for item in line] == [0, WIDTH / 2, WIDTH]
    assert [item["y"] for item in line] == [HEIGHT, HEIGHT / 2, 0], "pixels are counted from the top: 100 % is there"


def test_the_numbers_beside_the_y_axis_grow_upwards_as_the_points_do():
    plot = curves(Curve("a", np.array([1, 2]), np.array([0.0, 10])), zero=True)
    left = {number: y for number, (x, y) in places_of_numbers(render_svg(build_chart(plot))).items() if x < 0}
    heights = [left[number] for number in sorted(left)]
    assert len(heights) >= 3 and heights == sorted(heights, reverse=True)
    (line,) = marks(plot, "line")
    assert line[1]["y"] < line[0]["y"] and left[10] - left[0] == pytest.approx(line[1]["y"] - line[0]["y"])


def test_the_legend_has_the_name_colour_and_dashes_of_each_line():
    x = np.array([1, 2])
    plot = curves(*(Curve(f"run {i}", x, x + i, style=i) for i in range(3)))
    assert [name for name in texts(render_svg(build_chart(plot))) if name.startswith("run")] == [
        "run 0",
        "run 1",
        "run 2",
    ]
    lines = marks(plot, "line")
    assert [items[0]["stroke"] for items in lines] == list(COLOURS[:3])
    assert [items[0]["strokeDash"] for items in lines] == [[1, 0], [6, 3], [6, 2, 1.5, 2]]


def test_looks_of_32_runs_differ_and_neighbours_not_by_colour_alone():
    x = np.array([1, 2])
    lines = marks(curves(*(Curve(str(i), x, x + i, style=i) for i in range(32))), "line")
    looks = [(items[0]["stroke"], tuple(items[0]["strokeDash"])) for items in lines]
    assert len(set(looks)) == 32 and all(look[1] != next_look[1] for look, next_look in pairwise(looks))


def test_a_line_goes_on_after_a_value_that_is_infinite():
    plot = curves(Curve("a", np.arange(1, 6), np.array([np.inf, 2.0, 1.0, np.inf, 0.5])))
    drawing = render_svg(build_chart(plot))
    (path,) = [d for d in re.findall(r'<path d="([^"]*)" stroke="#0b3c5d" stroke-width="1.8"', drawing)]
    assert re.sub(r"[-\d.,]+", "", path).replace("Z", "") == "MLM", "two points joined, a gap, and one more"


def test_the_band_is_between_its_sides_and_two_known_rounds_have_bars():
    low, high = np.array([10.0, 20, 30]), np.array([90.0, 80, 100])
    plot = curves(Curve("a", np.arange(3), np.full(3, 50.0), low=low, high=high), zero=True)
    (area,) = marks(plot, "area")
    assert [HEIGHT - item["y"] for item in area] == pytest.approx((low * HEIGHT / 100).tolist())
    assert [HEIGHT - item["y2"] for item in area] == pytest.approx((high * HEIGHT / 100).tolist())
    low[0] = np.nan
    (bars,) = [items for items in marks(plot, "rule") if items[0].get("strokeWidth") == 4]
    assert [bar["x"] for bar in bars] == [WIDTH / 2, WIDTH]


def test_a_pointer_over_a_round_is_told_all_curves_also_of_names_with_dots():
    x = np.array([1, 2])
    plot = curves(*(Curve(name, x, x + 0.5, style=i) for i, name in enumerate(("a.b[0]", "c"))))
    (rules,) = marks(plot, "rule")
    assert [rule["x"] for rule in rules] == [0, WIDTH], "one for each round"
    (hover,) = [layer for layer in build_chart(plot)["layer"] if layer.get("name") == "hover"]
    tips = [(tip["field"], tip["title"]) for tip in hover["encoding"]["tooltip"]]
    assert tips == [("x", "round"), ("0", "a.b[0]"), ("1", "c")]


def test_lines_that_are_not_picked_in_the_legend_are_hidden():
    x = np.array([1, 2])
    plot = curves(*(Curve(name, x, x, style=i) for i, name in enumerate("ab")))
    lines = marks(plot, "line", picked=[{"series": "b"}])
    assert [items[0].get("opacity", 1) for items in lines] == [0, 1]


@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
def test_rounds_are_whole_numbers_on_every_axis(rounds):
    x = np.arange(1, rounds + 1)
    stack = Stack(**ABOUT, x_label="round", y_label="s", x=x, parts={"a": np.zeros(rounds)})
    parts = (("p", curves(Curve("a", x, np.zeros(rounds)))), ("q", curves(Curve("a", x, np.zeros(rounds)))))
    for plot in (curves(Curve("a", x, np.zeros(rounds))), stack, Multiples(**ABOUT, parts=parts)):
        drawing = re.sub(
            r'<g[^>]*transform="translate\(-[^<]*<text[^>]*>[^<]*</text>', "", render_svg(build_chart(plot))
        )
        labels = [text for text in texts(drawing) if re.fullmatch(r"[\d.]+", text)]
        assert not [text for text in labels if "." in text and float(text) > 1], labels


def test_the_best_point_has_a_ring():
    plot = curves(Curve("a", np.arange(41), np.arange(41.0), mark=30))
    rings = [items for items in marks(plot, "symbol") if items[0]["size"] == 90]
    assert [[item["x"] for item in items] for items in rings] == [[pytest.approx(WIDTH * 3 / 4)]]


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances():
    (line,) = marks(curves(Curve("a", np.array([1.0, 10, 100]), np.ones(3)), x_label="bytes", x_log=True), "line")
    assert [item["x"] for item in line] == pytest.approx([0, WIDTH / 2, WIDTH])


def test_layers_are_in_their_order_below_the_axis():
    plot = curves(Curve("a", np.arange(1, 4), np.array([3.0, 2, 1])), x_names=("fc", "body", "head"))
    assert [line.split(",")[2] for line in plot.table().splitlines()[1:]] == ["fc", "body", "head"]
    names = [name for name in texts(render_svg(build_chart(plot))) if name in ("fc", "body", "head")]
    assert names == ["fc", "body", "head"]
    (line,) = marks(plot, "line")
    assert [item["x"] for item in line] == sorted(item["x"] for item in line)


def test_of_many_names_on_an_axis_some_are_written():
    names = tuple(f"class {i}" for i in range(100))
    drawing = render_svg(build_chart(curves(Curve("a", np.arange(1, 101), np.zeros(100)), x_names=names)))
    assert 10 <= len({*texts(drawing)} & {*names}) <= 25 and "class 0" in texts(drawing)


def test_small_drawings_of_several_runs_have_common_axes():
    x = np.array([1, 2])
    parts = [(name, curves(Curve("", x, np.array([0.0, top])))) for name, top in (("a", 50), ("b", 100))]
    plot = Multiples(**ABOUT, parts=tuple(parts))
    first, second = marks(plot, "line")
    assert first[1]["y"] == pytest.approx((first[0]["y"] + second[1]["y"]) / 2) and first[1]["x"] == NARROW
    assert {"a", "b"} <= {*texts(render_svg(build_chart(plot)))}


def test_one_client_is_shown_at_a_time_also_where_a_run_lacks_it():
    x = np.array([1, 2])
    several = [Curve("a", x, x + client, client=client) for client in range(3)] + [Curve("b", x, x, client=0)]
    plot = curves(*several, single_client=True)
    assert [len(items) for items in marks(plot, "line")] == [2, 2], "the first client, in both runs"
    (line,) = marks(plot, "line", client=2)
    assert line[1]["y"] < line[0]["y"]


def test_a_client_stands_out_in_the_distribution():
    plot = curves(Curve("a", np.array([10, 30, 50]), np.array([1.0, 2, 3]), points=np.array([4, 0, 7])))
    ordinary = marks(plot, "symbol")
    chosen = [items for items in marks(plot, "symbol", client=7) if items[0]["size"] == 90]
    assert [[item["x"] for item in items] for items in chosen] == [[WIDTH]]
    assert not [items for items in ordinary if items[0]["size"] == 90]


# --- bars and matrices


def test_parts_of_a_bar_add_up_and_the_first_is_at_the_bottom():
    parts = {"computation": np.array([3.0, 1.0]), "communication": np.array([1.0, 1.0])}
    plot = Stack(**ABOUT, x_label="round", y_label="time (s)", x=np.arange(1, 3), parts=parts)
    (bars,) = marks(plot, "rect")
    by_part = {bar["fill"]: [] for bar in bars}
    for bar in bars:
        by_part[bar["fill"]].append(bar)
    lower, upper = by_part[COLOURS[0]], by_part[COLOURS[1]]
    assert [bar["y"] + bar["height"] for bar in lower] == [HEIGHT, HEIGHT]
    assert [bar["height"] for bar in lower] == pytest.approx([HEIGHT * 3 / 4, HEIGHT / 4])
    assert [bar["y"] + bar["height"] for bar in upper] == pytest.approx([bar["y"] for bar in lower])


def test_rows_of_a_matrix_begin_at_the_top_and_unknown_cells_are_empty():
    (cells,) = marks(matrix([[0, np.nan, 1], [0.5, 0.5, 0.5]]), "rect")
    assert len(cells) == 5
    at = {(round(3 * cell["x"] / WIDTH), round(cell["y"] / cells[0]["height"])): cell["fill"] for cell in cells}
    assert at.keys() == {(0, 0), (2, 0), (0, 1), (1, 1), (2, 1)}
    assert at[0, 0] == "rgb(59, 73, 108)" and at[2, 0] == "rgb(254, 232, 56)", "the lowest is dark, the highest yellow"


def test_numbers_beside_axes_and_scales_keep_their_digits():
    panels = tuple(
        Panel(name, np.array([[0, low], [low + 4e-4, 0]]), "ab", "ab") for name, low in (("x", 0.9991), ("y", 0.5))
    )
    plot = Matrices(
        **ABOUT, row_label="r", column_label="c", value_label="v", panels=panels, own_scales=True, hide_diagonal=True
    )
    assert {"0.9991", "0.9995", "0.5", "0.5004"} <= {*texts(render_svg(build_chart(plot)))}
    drawing = render_svg(build_chart(curves(Curve("a", np.arange(1, 4), np.array([0.001, 0.002, 0.0037])))))
    assert [text for text in texts(drawing) if text.startswith("0.00")], "not 0 for 0.001"


def test_categories_have_colours_of_their_own_and_only_those_that_are_there_are_named():
    plot = matrix([[0, 2], [9, np.nan]], categories=tuple(map(str, range(10))))
    (cells,) = marks(plot, "rect")
    assert [cell["fill"] for cell in cells] == [COLOURS[0], COLOURS[2], COLOURS[9]]
    named = [name for name in texts(render_svg(build_chart(plot))) if name.startswith("beta")]
    assert named == ["beta 0", "beta 2", "beta 9"]


def test_matrices_of_several_runs_have_one_scale_of_colours():
    plot = Multiples(**ABOUT, parts=(("a", matrix([[0.25]])), ("b", matrix([[0.75]]))))
    drawing = render_svg(build_chart(plot))
    first, second = marks(plot, "rect")
    assert first[0]["fill"] == "rgb(59, 73, 108)" and second[0]["fill"] == "rgb(254, 232, 56)"
    assert {"a", "b"} <= {*texts(drawing)} and texts(drawing).count("beta") == 1


def test_matrices_with_scales_of_their_own_use_all_colours_each():
    panels = tuple(Panel(name, np.array(v), [0], [1, 2]) for name, v in (("a", [[0.98, 0.99]]), ("b", [[0.1, 0.9]])))
    words = {"row_label": "client", "column_label": "client", "value_label": "cosine"}
    first, second = marks(Matrices(**ABOUT, **words, panels=panels, own_scales=True), "rect")
    ends = ["rgb(59, 73, 108)", "rgb(254, 232, 56)"]
    assert [cell["fill"] for cell in first] == [cell["fill"] for cell in second] == ends


def test_a_client_that_is_chosen_is_framed_as_a_column_too():
    plot = replace(matrix([[0, 1], [1, 0]]), column_label="client")
    framed = [items[0] for items in marks(plot, "rect", client=11) if items[0].get("stroke") == COLOURS[1]]
    assert [(frame["x"], frame["width"], frame["height"] > 100) for frame in framed] == [(WIDTH / 2, WIDTH / 2, True)]


def test_a_client_that_is_chosen_is_framed_in_each_matrix():
    plot = Multiples(**ABOUT, parts=(("a", matrix([[1], [2], [3]])), ("b", matrix([[1], [2]]))))
    frames = [items for items in marks(plot, "rect", client=2) if "cells" not in items[0] and items[0].get("stroke")]
    assert len(frames) == 1 and frames[0][0]["stroke"] == COLOURS[1], "the second matrix has no client 2"


def test_samples_of_a_client_are_beside_each_other_by_part():
    bars = ((0, "a", "cat", "training", 4), (0, "a", "cat", "test", 2), (1, "a", "dog", "training", 1))
    plot = Bars(**ABOUT, x_label="class", y_label="samples", names=("cat", "dog"), bars=bars)
    (shown,) = marks(plot, "rect")
    assert [bar["height"] for bar in shown] == [HEIGHT, HEIGHT / 2] and shown[0]["x"] < shown[1]["x"] < WIDTH / 2


# --- points


def test_classes_have_colours_and_servers_points_stand_out():
    points = np.array([[0.0, 0], [0, 0], [1, 1], [1, 0]])
    cloud = Cloud("round 1", points, np.array([0, 1, 2, 0]), np.array([-1, -1, -1, 5]))
    plot = Clouds(**ABOUT, x_label="x", y_label="y", clouds=(cloud,))
    (shown,) = marks(plot, "symbol")
    assert [item["fill"] for item in shown] == [COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[0]]
    assert shown[2]["y"] < shown[0]["y"] and shown[2]["x"] > shown[0]["x"]
    assert [item["size"] for item in shown] == [110, 110, 110, 22]


@pytest.mark.parametrize(
    "plot",
    [
        curves(Curve("a", np.arange(3), np.arange(3.0), low=np.zeros(3), high=np.ones(3), mark=1)),
        curves(Curve("", np.arange(3), np.full(3, np.nan))),
        curves(Curve("a", np.array([1]), np.array([1.0]), client=3), x_names=("fc",), single_client=True),
        matrix(np.full((2, 2), np.nan)),
        matrix([[0, 1]], categories=("x", "y")),
        Stack(
            **ABOUT, x_label="", y_label="s", x=np.arange(2.0), names=("1 rank", "2"), parts={"a": np.ones(2)}, top=1.0
        ),
        Bars(**ABOUT, x_label="class", y_label="samples", names=("cat",), bars=((0, "a", "cat", "test", 2),)),
        Clouds(**ABOUT, x_label="x", y_label="y", clouds=(Cloud("", np.zeros((1, 2)), np.zeros(1), np.zeros(1)),)),
    ],
    ids=["curves", "unknown", "client", "empty", "categories", "names", "bars", "points"],
)
def test_charts_are_what_vega_lite_allows(plot):
    made = altair.Chart.from_dict(build_chart(plot))
    assert vl_convert.vegalite_to_svg(made.to_dict()).startswith("<svg"), "Altair moves parameters"


# --- what is left out, and files


def test_of_many_points_some_are_drawn_with_the_best_and_the_caption_says_so():
    x = np.arange(1000)
    plot = curves(Curve("a", x, np.sin(x / 99.0), mark=155, points=x))
    shown = downsample(plot)
    assert isinstance(shown, Curves)
    (curve,) = shown.curves
    assert len(curve.x) <= 301 and curve.mark is not None and curve.x[curve.mark] == 155
    assert (curve.x[0], curve.x[-1]) == (0, 999) and "At most 300 points of each curve are drawn" in shown.caption
    assert len(plot.table().splitlines()) == 1001


@pytest.mark.parametrize(("tops", "domain"), [((1.0, 2.0), [0, 2.0]), ((1.0, None), None)])
def test_bars_of_several_runs_are_cut_off_at_one_height_where_all_are(tops, domain):
    stacks = [
        Stack(**ABOUT, x_label="round", y_label="s", x=np.arange(2), parts={"a": np.ones(2)}, top=top) for top in tops
    ]
    spec = build_chart(Multiples(**ABOUT, parts=tuple(zip("ab", stacks, strict=True))))["spec"]
    assert spec["encoding"]["y"].get("scale", {}).get("domain") == domain and spec["mark"]["clip"] == (
        domain is not None
    )


def test_of_many_clients_some_rows_are_drawn_and_many_rounds_are_means():
    shown = downsample(matrix(np.arange(400.0 * 40).reshape(400, 40)))
    assert isinstance(shown, Matrices) and shown.panels[0].values.size <= 3000
    assert shown.panels[0].values[-1, -1] == 400 * 40 - 1 and "75 of 400 clients are drawn" in shown.caption
    stack = Stack(**ABOUT, x_label="round", y_label="s", x=np.arange(1, 121), parts={"a": np.arange(120.0)})
    bars = downsample(stack)
    assert isinstance(bars, Stack) and bars.width == 2 and bars.parts["a"][:2].tolist() == [0.5, 2.5]
    assert "Each bar is the mean of 2 rounds" in bars.caption


@pytest.mark.parametrize(("rows", "columns"), [(80, 80), (150, 300)])
def test_the_diagonal_is_hidden_also_where_some_rows_and_columns_are_drawn(rows, columns):
    values = np.ones((rows, columns))
    np.fill_diagonal(values, 100)
    names = [f"name {place}" for place in range(columns)]
    panel = Panel("", values, names[:rows], names)
    words = {"row_label": "class", "column_label": "taken for", "value_label": "v"}
    shown = downsample(Matrices(**ABOUT, **words, panels=(panel,), hide_diagonal=True))
    (drawn,) = shown.panels
    hidden = np.isnan(drawn.drawn_values(hide_diagonal=True))
    assert drawn.values.size <= 3000 and np.nanmax(drawn.drawn_values(hide_diagonal=True)) == 1
    assert hidden.tolist() == [[row == column for column in drawn.columns] for row in drawn.rows]
    assert drawn.columns[-1] == names[-1] and f"{len(drawn.rows)} of {rows} classes are drawn" in shown.caption


def test_a_figure_is_written_in_all_forms_and_twice_alike(tmp_path):
    plot = curves(Curve("a", np.arange(3), np.arange(3.0), mark=1))
    drawn = draw(plot, tmp_path, PICTURES)
    first = [path.read_bytes() for path in (drawn.svg, *drawn.pictures)]
    assert first[1].startswith(b"\x89PNG") and first[2].startswith(b"%PDF") and first[0].startswith(b"<svg")
    width = int(re.findall(rb'width="(\d+)"', first[0])[0])
    assert int.from_bytes(first[1][16:20], "big") == 2 * width, "two pixels of a picture for one of a page"
    draw(plot, tmp_path, PICTURES)
    assert (drawn.svg.read_bytes(), drawn.pictures[0].read_bytes()) == tuple(first[:2])


def test_names_that_look_like_parts_of_a_drawing_stay_as_they_are(tmp_path):
    names = [COLOURS[0], "rgb(1, 2, 3)", "clip0", 'a class="b"', "1 > 0"]
    drawn = draw(curves(*(Curve(name, np.arange(2), np.arange(2.0), style=1) for name in names)), tmp_path)
    for svg in (drawn.inline, drawn.svg.read_text()):
        assert {*names} <= {html.unescape(text) for text in re.findall("<text[^>]*>([^<]+)<", svg)}
    assert COLOURS[0] in drawn.spec and "var(--c0)" not in drawn.spec and "var(--c1)" in drawn.spec


def test_a_drawing_on_a_page_has_the_colours_of_the_page(tmp_path):
    drawn = draw(curves(Curve("a", np.arange(3), np.arange(3.0), style=1)), tmp_path)
    assert "currentColor" in drawn.inline and "currentColor" in dump_config()
    for text in (drawn.inline, drawn.spec + dump_config()):
        assert "var(--c1)" in text and INK not in text and COLOURS[1] not in text
    assert COLOURS[1] in drawn.svg.read_text() and "var(" not in drawn.svg.read_text()

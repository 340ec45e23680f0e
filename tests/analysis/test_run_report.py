"""`pflmpi report RUN ...`: the page, its files, and what it does with folders that cannot be shown."""

import csv
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest

import quick_run
from pflmpi.analysis.checkpoint import Checkpoint
from pflmpi.analysis.comparable import damaged
from pflmpi.analysis.drawing import style, svg
from pflmpi.analysis.drawing.files import PICTURES, draw
from pflmpi.analysis.drawing.scene import Line, Marks, Scene
from pflmpi.analysis.page.contents import detailed
from pflmpi.analysis.page.html import Section, page
from pflmpi.analysis.plots import Cloud, Clouds, Curve, Curves, Matrices, Missing, Panel, Plot, Stack
from pflmpi.analysis.run import open_run
from pflmpi.analysis.series.final import Dots
from pflmpi.analysis.series.scores import client_accuracy
from pflmpi.analysis.series.selection import named
from pflmpi.cli import main
from pflmpi.store import checked_hdf5, config_file
from pflmpi.store.metrics import metrics_file

NOTHING_MORE = {"link", "iframe", "object", "embed", "img"}
POINT = Curve("one", np.ones(1), np.ones(1), low=np.zeros(1), high=np.full(1, 2.0), mark=0)
UNKNOWN = np.full(3, np.nan)
PLOTS: list[Plot] = [
    Curves(
        name="curves",
        title="a",
        caption="b",
        x_label="round",
        y_label="accuracy (%)",
        curves=tuple(
            Curve(
                f"run {i}", np.arange(3), np.arange(3.0) + i, low=np.full(3, np.nan), high=np.full(3, np.nan), style=i
            )
            for i in range(20)
        ),
        by_round=True,
        percent=True,
    ),
    Curves(name="log", title="a", caption="b", x_label="x (s)", y_label="y", x_log=True, zero=True, curves=(POINT,)),
    Curves(
        name="named", title="a", caption="b", x_label="layer", y_label="y", curves=(POINT,), x_names=("fc1", "head")
    ),
    Dots(
        name="dots",
        title="e",
        caption="f",
        row_label="client",
        x_label="gain",
        rows=("a", "b"),
        series={"one": np.array([-1.0, np.nan]), "two": np.array([0.0, 2.0])},
        styles=(0, 1),
    ),
    Curves(name="apart", title="e", caption="f", x_label="x", y_label="y", curves=(POINT, POINT), apart=True),
    Stack(name="stack", title="a", caption="b", x_label="round", y_label="s", x=np.arange(2), parts={"a": np.ones(2)}),
    Matrices(
        name="unknown",
        title="a",
        caption="b",
        row_label="client",
        column_label="round",
        value_label="v",
        panels=(Panel("", np.full((2, 2), np.nan), [0, 1], [0, 1]),),
    ),
    Matrices(
        name="categories",
        title="a",
        caption="b",
        row_label="client",
        column_label="round",
        value_label="cluster",
        panels=tuple(Panel(str(i), np.eye(3), range(3), range(3)) for i in range(4)),
        categories=("0", "1"),
        hide_diagonal=True,
    ),
    Clouds(
        name="clouds",
        title="a",
        caption="b",
        x_label="x",
        y_label="y",
        clouds=(Cloud("round 1", np.zeros((2, 2)), np.array([0, 3]), np.array([-1, 5])),),
    ),
]


class Elements(HTMLParser):
    """The elements of a page with their attributes, its texts, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: two that can be compared, and one with another partition."""
    folder = tmp_path_factory.mktemp("runs")
    quick_run.run(quick_run.settings(), folder / "gmh")
    quick_run.run(quick_run.settings(algorithm={"name": "local"}), folder / "local")
    other = {"name": "exdir", "clients": 5, "classes_per_client": 3, "alpha": 0.7, "min_samples": 4}
    quick_run.run(quick_run.settings(partition=other, training={"rounds": 1}), folder / "other")
    return folder


@pytest.fixture(scope="module")
def reported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report over the two that can be compared."""
    out = tmp_path_factory.mktemp("reported")
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(out)]) == 0
    return out


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_path_of_the_page_is_printed_and_nothing_else(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr()
    assert shown.out == f"{tmp_path / 'report.html'}\n" and shown.err == ""


def test_a_page_needs_nothing_else_and_names_files_that_are_there(reported: Path) -> None:
    text = (reported / "report.html").read_text()
    elements = Elements(text).found
    assert not {tag for tag, _ in elements} & NOTHING_MORE
    assert not [attributes for tag, attributes in elements if tag == "script" and "src" in attributes]
    (policy,) = (each["content"] for tag, each in elements if tag == "meta" and "http-equiv" in each)
    assert policy and "default-src 'none'" in policy and "http" not in policy
    targets = [value or "" for _, attributes in elements for name, value in attributes.items() if name.endswith("href")]
    files = [target for target in targets if not target.startswith(("#", "data:image/png;base64,"))]
    assert len(files) == 2 * text.count("<figure>") >= 20
    assert all((reported / file).stat().st_size > 0 for file in files)
    assert "url(http" not in text and "@import" not in text and "prefers-color-scheme: dark" in text


def test_several_runs_are_side_by_side_where_they_have_the_same_axes(reported: Path) -> None:
    with open(reported / "figures" / "seconds_per_round_of_runs.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["run"], line["round"]) for line in lines] == [(run, n) for run in ("fedgmh", "local") for n in "123"]
    assert not list((reported / "figures").glob("0*/seconds_per_round.csv"))


def test_a_second_report_leaves_no_figures_of_the_first_and_no_other_file_is_touched(
    runs: Path, tmp_path: Path
) -> None:
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]) == 0
    (tmp_path / "figures" / "01-fedgmh" / "mine.png").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["report", str(runs / "other"), "--out", str(tmp_path)]) == 0
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    targets = re.findall(r'href="(figures/[^"]+)"', (tmp_path / "report.html").read_text())
    assert there == {"report.html", "runs.csv", "notes.txt", "figures/01-fedgmh/mine.png", *targets}
    assert not (tmp_path / "figures" / "02-local").exists()


def test_every_figure_has_words_for_those_who_do_not_see_it(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "gmh"), "--out", str(tmp_path)]) == 0
    drawings = [
        attributes for tag, attributes in Elements((tmp_path / "report.html").read_text()).found if tag == "svg"
    ]
    assert len(drawings) >= 8
    assert all(one["role"] == "img" and len(one["aria-label"] or "") > 40 for one in drawings)


def test_text_follows_the_page_and_colours_are_its_variables(reported: Path) -> None:
    text = (reported / "report.html").read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "currentColor" in drawn and "var(--c0)" in drawn
    assert not any(colour in drawn for colour in (style.INK, *style.COLOURS))
    assert all(f"--c{number}: {colour}" in text for number, colour in enumerate(style.ON_DARK))


def test_names_from_outside_are_escaped(runs: Path, tmp_path: Path) -> None:
    for name in ("a<b>&x", "c"):
        shutil.copytree(runs / "gmh", tmp_path / name)
    assert main(["report", str(tmp_path / "a<b>&x"), str(tmp_path / "c"), "--out", str(tmp_path / "out")]) == 0
    page_text = (tmp_path / "out" / "report.html").read_text()
    assert "a<b>" not in page_text and "a&lt;b&gt;&amp;x" in page_text
    assert "fedgmh a<b>&x" in Elements(page_text).texts


def test_what_is_missing_is_said_where_it_would_be() -> None:
    text = page("title", "about", [], [Section("one", figures=[Missing("Beta", "it is <not> there")])])
    assert "Not shown: Beta (it is &lt;not&gt; there)." in text and "Left out" not in text


def test_the_tables_have_what_the_figures_show(reported: Path) -> None:
    with open(reported / "figures" / "clients_at_the_end.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["curve"] for line in lines} == {"fedgmh", "local"}
    assert sorted(int(line["point"]) for line in lines if line["curve"] == "local") == list(range(7))
    with open(reported / "runs.csv") as file:
        assert [line["run"] for line in csv.DictReader(file)] == ["fedgmh", "local"]


def test_a_run_that_has_just_begun_is_reported(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for name in ("config.yaml", "partition.csv"):
        shutil.copy(runs / "gmh" / name, tmp_path / "new")
    metrics_file.restart(tmp_path / "new", 0)
    assert main(["report", str(tmp_path / "new"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "no round has been evaluated yet" in text and "has no good checkpoint" in text
    assert text.count("<figure>") == text.count("<h3>The partition</h3>") == 1


def test_many_runs_are_compared_and_the_first_shown_one_by_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pflmpi.analysis.page.contents.MOST_DETAILED", 1)
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]) == 0
    assert "Only the first 1 runs are shown one by one" in (tmp_path / "report.html").read_text()
    assert [path.name for path in (tmp_path / "figures").iterdir() if path.is_dir()] == ["01-fedgmh"]


# --- what cannot be shown -----------------------------------------------------------------------------------------


def test_runs_that_cannot_be_compared_are_left_out_naming_the_key(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs / name) for name in ("gmh", "other", "local")]
    assert main(["report", *words, str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert shown.err.splitlines() == [
        f"pflmpi: {runs / 'other'} cannot be compared with {runs / 'gmh'}: partition.clients is 5 and not 7; "
        "report it by itself",
        f"pflmpi: {tmp_path / 'nowhere'} is no folder; name the folder that `pflmpi run` printed",
    ]
    text = (tmp_path / "report.html").read_text()
    assert "partition.clients is 5 and not 7" in text and "nowhere is no folder" in text
    with open(tmp_path / "runs.csv") as file:
        assert [line["run"] for line in csv.DictReader(file)] == ["fedgmh", "local"]


def test_another_seed_of_the_same_partition_can_be_compared(runs: Path, tmp_path: Path) -> None:
    quick_run.run(quick_run.settings(seed=4, training={"rounds": 1}), tmp_path / "seed4")
    assert main(["report", str(runs / "gmh"), str(tmp_path / "seed4"), "--out", str(tmp_path / "out")]) == 0


def test_other_data_with_the_same_configuration_is_found_by_its_hash(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "gmh", tmp_path / "run")
    for path in (tmp_path / "run").glob("round_*.h5"):
        path.unlink()  # which would show that it was changed
    text, _, _ = (tmp_path / "run" / "config.yaml").read_text().rpartition("# CRC-32")
    config_file.write(tmp_path / "run", re.sub(r"(recorded:.*?data: )\w+", r"\1feed", text, flags=re.DOTALL))
    assert main(["report", str(runs / "gmh"), str(tmp_path / "run"), "--out", str(tmp_path)]) == 1
    assert "the hash of the data is feed and not" in capfd.readouterr().err


def test_a_truncated_checkpoint_is_named_and_the_rest_reported(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "gmh", tmp_path / "run")
    damaged = tmp_path / "run" / "round_00003.h5"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 1
    assert f"{damaged} is damaged: 2000 bytes long" in capfd.readouterr().err
    text = (tmp_path / "report.html").read_text()
    assert "round_00003.h5 is damaged" in text and "round 2" in text and text.count("<figure>") >= 8


def test_a_missing_shard_leaves_out_what_needs_it(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "gmh", tmp_path / "run")
    for path in (tmp_path / "run" / "shards").iterdir():
        path.unlink()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 1
    assert "_rank_000.h5 is missing" in capfd.readouterr().err
    text = (tmp_path / "report.html").read_text()
    assert "<h3>Similarity of the clients&#x27; layers</h3>" in text or "Similarity of the clients' layers" in text
    assert "Accuracy over rounds" in text and text.count("Not shown:") >= 2


def test_damaged_metrics_are_named(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "gmh", tmp_path / "run")
    path = tmp_path / "run" / "metrics.csv"
    path.write_text(path.read_text().replace("\n2,", "\ntwo,"))
    assert main(["report", str(tmp_path / "run"), str(runs / "local"), "--out", str(tmp_path)]) == 1
    assert "metrics.csv differs from what round 3 recorded, in line" in capfd.readouterr().err


def test_nothing_to_report_ends_with_2(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "gmh", tmp_path / "newer")
    for path in (tmp_path / "newer").glob("round_*.h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 99
    words = ["report", str(tmp_path / "newer"), str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    error = capfd.readouterr().err
    assert "written by a newer pflmpi: its format version is 99" in error and "nowhere is no folder" in error
    assert not (tmp_path / "out").exists()


def test_options_of_tables_are_refused_for_runs(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "gmh"), "--seeds", "2"]) == 2
    assert "--seeds is for the report of a table file" in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(runs / "gmh"), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write the report in" in capfd.readouterr().err


# --- drawing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_every_kind_of_figure_can_be_drawn_and_twice_alike(plot: Plot, tmp_path: Path) -> None:
    drawn = draw(plot, tmp_path, PICTURES)
    first = [path.read_bytes() for path in (drawn.svg, *drawn.pictures)]
    element = ElementTree.fromstring(first[0])
    assert element.tag.endswith("svg") and all(ElementTree.fromstring(each).tag == "svg" for each in drawn.inline)
    assert first[1].startswith(b"\x89PNG") and first[2].startswith(b"%PDF")
    draw(plot, tmp_path, PICTURES)
    assert [path.read_bytes() for path in (drawn.svg, *drawn.pictures)] == first
    width = int.from_bytes(first[1][16:20], "big")
    assert width == 2 * float(element.get("width") or 0), "two pixels of a picture for one of a page"


def test_pictures_are_made_where_they_are_asked_for(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "local"), "--out", str(tmp_path), "--png", "--pdf"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "figures/accuracy_over_rounds.png" in text and "figures/accuracy_over_rounds.pdf" in text
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in (tmp_path / "figures").rglob("*.*")} == {".csv", ".svg"}, "no older ones remain"


def test_a_page_is_made_without_matplotlib_scikit_learn_and_scipy(runs: Path, tmp_path: Path) -> None:
    heavy = "matplotlib", "sklearn", "scipy", "torch", "pandas"
    said = f"print(main(sys.argv[1:]), *[name for name in {heavy} if name in sys.modules])"
    words = ["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]
    code = f"import sys; from pflmpi.cli import main; {said}"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_a_report_looks_once_at_each_round_and_reads_one_metric_for_accuracies(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, read = Counter[Path](), list[str]()
    mistaken, get = Checkpoint.mistaken, checked_hdf5.get

    def look(checkpoint: Checkpoint) -> list[str]:
        looked[checkpoint.path] += 1
        return mistaken(checkpoint)

    def note(group: Any, path: str) -> Any:
        if group.name == "/metrics":
            read.append(path)
        return get(group, path)

    monkeypatch.setattr(Checkpoint, "mistaken", look)
    monkeypatch.setattr(checked_hdf5, "get", note)
    among = [open_run(runs / name) for name in ("gmh", "local")]
    for one in among:
        assert damaged(one) == []
        assert client_accuracy(one, one.rounds) and detailed(named([one])[0])
    assert len(looked) >= 6 and sum(looked.values()) == len(looked) + len(among), "twice at the newest, for its shards"
    assert read.count("accuracy") == len(looked) and "hits" not in read


@pytest.mark.parametrize("shape", style.SHAPES)
def test_the_points_of_labelled_marks_can_be_found_in_their_path(shape: str) -> None:
    points = np.array([[1.5, 2.0], [np.nan, 1.0], [30.25, 4.0]])
    marks = Marks(points=points, colour="c0", shape=shape, label="a", names=("x", "y", "z"))
    text = svg.inline(Scene(40, 10, (marks, Line(points=points[[0, 2]], label="b"))), "about")
    found = [re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path) for path in re.findall(r' d="([^"]*)"', text)]
    assert found == [[("1.5", "2"), ("30.25", "4")]] * 2 and 'data-names="x|z"' in text


def test_colours_differ_in_brightness_or_lines_differ() -> None:
    looks = [(style.colour(i), style.dash(i), style.mark(i, 10)[0]) for i in range(32)]
    assert len(set(looks)) == 32
    neighbours = [(looks[i][1] != looks[i + 1][1], looks[i][2] != looks[i + 1][2]) for i in range(31)]
    assert all(any(pair) for pair in neighbours)

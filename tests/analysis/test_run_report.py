"""`pflmpi report RUN ...`: the page, its files, and what it does with folders that cannot be shown."""

import csv
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest

import pflmpi
import quick_run
from pflmpi.analysis import report
from pflmpi.analysis.comparable import check_shown
from pflmpi.analysis.drawing.charts import COLOURS, INK
from pflmpi.analysis.drawing.html import PageFigure, Section, build_page, draw_figures
from pflmpi.analysis.drawing.rendering import ON_DARK
from pflmpi.analysis.figures import make_run_figures
from pflmpi.analysis.plots import Curve, Curves, Missing
from pflmpi.analysis.run import Run, open_run
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series import diagnostics, similarity
from pflmpi.analysis.series.accuracy import read_main_by_round
from pflmpi.cli import main
from pflmpi.errors import CheckpointError
from pflmpi.store import checked_hdf5, config_file, job_file, metrics_file, verify
from pflmpi.store.job_file import End, Start
from pflmpi.store.names import round_path

NOTHING_MORE = {"link", "iframe", "object", "embed", "img"}


class Elements(HTMLParser):
    """The elements of a page with their attributes, its texts, and whether all are closed."""

    def __init__(self, text):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with runs: two that can be compared, and one with another partition."""
    folder = tmp_path_factory.mktemp("runs")
    quick_run.run(quick_run.settings(), folder / "gmh")
    quick_run.run(quick_run.settings(algorithm={"name": "local"}), folder / "local")
    partition = {"name": "exdir", "clients": 5, "classes_per_client": 3, "alpha": 0.7, "min_samples": 4}
    quick_run.run(quick_run.settings(partition=partition, training={"rounds": 1}), folder / "other")
    return folder


@pytest.fixture(scope="module")
def reported(runs, tmp_path_factory):
    """The report over the two that can be compared."""
    out = tmp_path_factory.mktemp("reported")
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(out)]) == 0
    return out


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_path_of_the_page_is_printed_and_nothing_else(runs, tmp_path, capfd):
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr()
    assert shown.out == f"{tmp_path / 'report.html'}\n" and shown.err == ""


def test_a_page_needs_nothing_else_and_names_files_that_are_there(reported):
    text = (reported / "report.html").read_text()
    elements = Elements(text).found
    assert not {tag for tag, _ in elements} & NOTHING_MORE
    assert not [attributes for tag, attributes in elements if tag == "script" and "src" in attributes]
    (policy,) = (attrs["content"] for tag, attrs in elements if tag == "meta" and "http-equiv" in attrs)
    assert policy and "default-src 'none'" in policy and "http" not in policy
    targets = [value or "" for _, attributes in elements for name, value in attributes.items() if name.endswith("href")]
    files = [target for target in targets if not target.startswith(("#", "data:image/png;base64,"))]
    assert len(files) == 2 * text.count("<figure ") >= 20
    assert all((reported / file).stat().st_size > 0 for file in files)
    assert "url(http" not in text and "@import" not in text and "prefers-color-scheme: dark" in text


def test_several_runs_are_side_by_side_where_they_have_the_same_axes(reported):
    with open(reported / "figures" / "seconds_per_round_of_runs.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["run"], line["round"]) for line in lines] == [(run, n) for run in ("fedgmh", "local") for n in "123"]
    assert not list((reported / "figures").glob("0*/seconds_per_round.csv"))


def test_a_second_report_leaves_no_figures_of_the_first_and_no_other_file_is_touched(runs, tmp_path):
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]) == 0
    (tmp_path / "figures" / "01-fedgmh" / "mine.png").write_bytes(b"mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["report", str(runs / "other"), "--out", str(tmp_path)]) == 0
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    targets = re.findall(r'href="(figures/[^"]+)"', (tmp_path / "report.html").read_text())
    assert files == {"report.html", "runs.csv", "notes.txt", "figures/01-fedgmh/mine.png", *targets}
    assert not (tmp_path / "figures" / "02-local").exists()


@pytest.mark.parametrize("own", ["report.html", "runs.csv"])
def test_files_that_no_report_has_written_are_neither_replaced_nor_deleted(own, runs, tmp_path, capfd):
    (tmp_path / "figures").mkdir()
    (tmp_path / own).write_text('<a href="figures/a.pdf">A</a>')
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 2
    assert f"{tmp_path / own} exists and is not known to be from pflmpi; choose another" in capfd.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [own]
    (tmp_path / own).rename(tmp_path / "figures" / "a.pdf")
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "a.pdf").exists()


def test_a_report_that_was_interrupted_is_made_again(runs, tmp_path, monkeypatch):
    words = ["report", str(runs / "local"), "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(report, "build_settings_table", lambda runs: 1 / 0)
        assert main(words) != 0
    assert (tmp_path / "runs.csv").exists() and main(words) == 0


def test_every_figure_has_words_for_those_who_do_not_see_it(runs, tmp_path):
    assert main(["report", str(runs / "gmh"), "--out", str(tmp_path)]) == 0
    elements = Elements((tmp_path / "report.html").read_text()).found
    drawings = [attributes for _, attributes in elements if "data-chart" in attributes]
    assert len(drawings) >= 8 and len(drawings) == [tag for tag, _ in elements].count("svg")
    assert all(drawing["role"] == "img" and len(drawing["aria-label"] or "") > 15 for drawing in drawings)


def test_text_follows_the_page_and_colours_are_its_variables(reported):
    text = (reported / "report.html").read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "currentColor" in drawn and "var(--c0)" in drawn
    assert not any(colour in drawn for colour in (INK, *COLOURS))
    assert all(f"--c{number}: {colour}" in text for number, colour in enumerate(ON_DARK))


def test_drawings_do_not_refer_into_each_other(reported):
    drawn = re.findall(r"<svg.*?</svg>", (reported / "report.html").read_text(), re.DOTALL)
    names = [name for drawing in drawn for name in set(re.findall(r' id="([^"]+)"', drawing))]
    assert len(names) == len(set(names)) > 0
    for drawing in drawn:
        assert set(re.findall(r"url\(#([^)]+)\)", drawing)) <= set(re.findall(r' id="([^"]+)"', drawing))


def test_a_page_needs_no_evaluation_of_texts_and_has_the_script_of_figures_once(reported):
    text = (reported / "report.html").read_text()
    assert "unsafe-eval" not in text and "ast: true" in text and text.count("window.vegaEmbed") == 1
    assert len(text) < 2_000_000


def test_the_data_of_a_chart_on_the_page_are_those_of_its_table(reported):
    text = (reported / "report.html").read_text()
    (charts,) = re.findall(r'id="charts">(.*?)</script>', text, re.DOTALL)
    (chart,) = (spec for spec in json.loads(charts) if spec["description"].startswith("Accuracy over rounds"))
    shown = [(point["series"], point["x"], point["y"]) for point in chart["data"]["values"]]
    with open(reported / "figures" / "accuracy_over_rounds.csv") as file:
        lines = list(csv.DictReader(file))
    accuracy = "accuracy, mean over clients (%)"
    assert shown == [(line["curve"], int(line["round"]), pytest.approx(float(line[accuracy]), 1e-4)) for line in lines]


def test_names_from_outside_are_escaped(runs, tmp_path):
    for name in ("a<b>&x", "c"):
        shutil.copytree(runs / "gmh", tmp_path / name)
    assert main(["report", str(tmp_path / "a<b>&x"), str(tmp_path / "c"), "--out", str(tmp_path / "out")]) == 0
    page_text = (tmp_path / "out" / "report.html").read_text()
    assert "a<b>" not in page_text and "a&lt;b&gt;&amp;x" in page_text
    assert "fedgmh a<b>&x" in Elements(page_text).texts


def test_a_page_has_the_settings_of_its_runs_and_says_how_it_was_made(runs, reported):
    text = (reported / "report.html").read_text()
    (table,) = re.findall(r"<summary><h2>Settings of the runs</h2></summary>(.*?)</details>", text, re.DOTALL)
    lines = [tuple(re.findall(r"<td[^>]*>(.*?)</td>", line)) for line in table.split("<tr>")]
    assert {("algorithm.name", "fedgmh", "fedgmh"), ("algorithm.name", "local", "local")} <= {*lines}
    assert {("training.lr", "0.1", "all"), ("recorded.ranks", "1", "all")} <= {*lines}
    (foot,) = re.findall(r"<footer>(.*?)</footer>", text)
    words = ["pflmpi", "report", str(runs / "gmh"), str(runs / "local"), "--out", str(reported)]
    assert re.search(rf"pflmpi {re.escape(pflmpi.__version__)} .*at \d{{4}}-\d\d-\d\d \d\d:\d\d", foot), foot
    assert shlex.join(words) in foot and platform.node() in foot


def test_a_page_is_printed_in_colour_with_all_that_is_folded_and_no_figure_cut_in_two(reported):
    (rules,) = re.findall(r"@media print \{(.*?\}) \}", (reported / "report.html").read_text(), re.DOTALL)
    for rule in ("print-color-adjust: exact", "break-inside: avoid", "break-after: avoid", "overflow: visible"):
        assert rule in rules
    assert "details::details-content { content-visibility: visible" in rules


def test_a_run_says_its_jobs_hosts_and_hours(runs, tmp_path):
    shutil.copytree(runs / "gmh", tmp_path / "a")
    start = Start(0, ("node1", "<node2>"), 8, 2, 8, 2, "python", "1", "2", "x")
    job_file.record(tmp_path / "a", {"Slurm job 12": 1}, start)
    job_file.record(tmp_path / "a", {"Slurm job 12": 1}, End("x", 1800, 7200))
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 0
    hours = "1.00 node hours, 4.00 core hours (50% busy), 1.00 GPU hours"
    text = " ".join(Elements((tmp_path / "out" / "report.html").read_text()).texts)
    assert f"used {hours}; job 12 (1 restart) on node1, <node2>." in text


def test_what_is_missing_is_said_where_it_would_be():
    text = build_page("title", "about", [], [Section("one", figures=[Missing("Beta", "it is <not> there")])])
    assert "Not shown: Beta (it is &lt;not&gt; there)." in text and "Left out" not in text


def test_the_tables_have_what_the_figures_show(reported):
    with open(reported / "figures" / "clients_at_the_end.csv") as file:
        lines = list(csv.DictReader(file))
    assert {line["curve"] for line in lines} == {"fedgmh", "local"}
    assert sorted(int(line["point"]) for line in lines if line["curve"] == "local") == list(range(7))
    with open(reported / "runs.csv") as file:
        assert [line["run"] for line in csv.DictReader(file)] == ["fedgmh", "local"]


def test_a_run_that_has_just_begun_is_reported(runs, tmp_path):
    (tmp_path / "new").mkdir()
    for name in ("config.yaml", "partition.csv"):
        shutil.copy(runs / "gmh" / name, tmp_path / "new")
    metrics_file.restart(tmp_path / "new", 0)
    assert main(["report", str(tmp_path / "new"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "no round has been evaluated yet" in text and "has no good checkpoint" in text
    assert text.count("<figure ") == text.count("<h3>The partition</h3>") == 1


def test_many_runs_are_compared_and_the_first_shown_one_by_one(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("pflmpi.analysis.figures.MOST_DETAILED", 1)
    assert main(["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]) == 0
    assert "Only the first 1 runs are shown one by one" in (tmp_path / "report.html").read_text()
    assert [path.name for path in (tmp_path / "figures").iterdir() if path.is_dir()] == ["01-fedgmh"]


# --- what cannot be shown -----------------------------------------------------------------------------------------


def test_runs_that_cannot_be_compared_are_left_out_naming_the_key(runs, tmp_path, capfd):
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


def test_another_seed_of_the_same_partition_can_be_compared(runs, tmp_path):
    quick_run.run(quick_run.settings(seed=4, training={"rounds": 1}), tmp_path / "seed4")
    assert main(["report", str(runs / "gmh"), str(tmp_path / "seed4"), "--out", str(tmp_path / "out")]) == 0


def other_data(run):
    for path in run.glob("round_*.h5"):
        path.unlink()  # which would show that it was changed
    text, _, _ = (run / "config.yaml").read_text().rpartition("# CRC-32")
    config_file.write(run, re.sub(r"(recorded:.*?data: )\w+", r"\1feed", text, flags=re.DOTALL))


def cut_checkpoint(run):
    (run / "round_00003.h5").write_bytes((run / "round_00003.h5").read_bytes()[:2000])


def no_shards(run):
    for path in (run / "shards").iterdir():
        path.unlink()


def changed_accuracy(run):
    with h5py.File(run / "round_00003.h5", "r+") as file:
        file["metrics/accuracy"][0] = 0.5


def cut_earlier_checkpoint(run):
    os.truncate(run / "round_00002.h5", 2000)


def edited_partition(run):
    head, end, line = (run / "partition.csv").read_text().rstrip().rpartition("\n")
    (run / "partition.csv").write_text(f"{head}{end}{line}1\n")


def edited_metrics(run):
    (run / "metrics.csv").write_text((run / "metrics.csv").read_text().replace("\n2,", "\ntwo,"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_data, "the hash of the data is feed and not"),
        (cut_checkpoint, "round_00003.h5 is damaged: 2000 bytes long"),
        (no_shards, "h5 is missing"),
        (cut_earlier_checkpoint, "round_00002.h5 is damaged: 2000 bytes long"),
        (changed_accuracy, "round_00003.h5 is damaged: its CRC-32 is"),
        (edited_partition, "partition.csv is not as it was written"),
        (edited_metrics, "metrics.csv differs from what round 3 recorded"),
    ],
)
def test_a_damaged_run_is_named_and_the_rest_reported(damage, message, runs, tmp_path, capfd):
    run = shutil.copytree(runs / "gmh", tmp_path / "run")
    damage(run)
    assert main(["report", str(runs / "local"), str(run), "--out", str(tmp_path)]) == 1
    text = (tmp_path / "report.html").read_text()
    assert message in capfd.readouterr().err and message in text and text.count("<figure ") >= 12


def test_of_a_run_without_its_shards_the_rest_is_reported(runs, tmp_path, capfd):
    run = shutil.copytree(runs / "gmh", tmp_path / "run")
    no_shards(run)
    assert main(["report", str(run), "--out", str(tmp_path)]) == 1
    assert "h5 is missing" in capfd.readouterr().err
    assert (tmp_path / "figures" / "client_accuracy.csv").exists()


@pytest.mark.parametrize("damage", [changed_accuracy, cut_checkpoint])
def test_a_run_whose_newest_checkpoint_is_damaged_is_not_shown(damage, runs, tmp_path, capfd):
    path = Path(shutil.copytree(runs / "gmh", tmp_path / "run"))
    damage(path)
    run, message = open_run(path), "round_00003.h5 is damaged"
    with pytest.raises(CheckpointError, match=message):
        run.final(run.main_measure)
    for words in (["compare", str(path), str(runs / "local")], ["report", str(path), "--out", str(tmp_path / "out")]):
        assert main(words) == 2 and message in capfd.readouterr().err


def test_values_of_clients_from_an_older_checkpoint_are_said_to_be(runs, tmp_path, capfd):
    path = Path(shutil.copytree(runs / "gmh", tmp_path / "run"))
    assert open_run(path).notes == []
    (path / "round_00003.h5").unlink()
    run, note = open_run(path), "values of clients are those of round 2"
    values = run.final(run.main_measure)
    assert values is not None and values.tolist() == run.round(2).metrics["accuracy"].tolist()
    assert run.notes[-1] == note
    assert main(["compare", str(path), str(runs / "local")]) == 0
    assert f"fedgmh: {note}" in " ".join(capfd.readouterr().out.split())
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert f"fedgmh: {note}." in (tmp_path / "out" / "report.html").read_text()


def test_nothing_to_report_ends_with_2(runs, tmp_path, capfd):
    shutil.copytree(runs / "gmh", tmp_path / "newer")
    for path in (tmp_path / "newer").glob("round_*.h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 99
    words = ["report", str(tmp_path / "newer"), str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    error = capfd.readouterr().err
    assert "written by a newer pflmpi: its format version is 99" in error and "nowhere is no folder" in error
    assert not (tmp_path / "out").exists()


def test_a_folder_of_runs_is_reported_as_its_runs(runs, tmp_path):
    for name in ("gmh", "local"):
        shutil.copytree(runs / name, tmp_path / "sweep" / name / "digits" / "seed0")
    (tmp_path / "sweep" / "notes").mkdir()
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "out")]) == 0
    with open(tmp_path / "out" / "runs.csv") as file:
        folders = [line["folder"] for line in csv.DictReader(file)]
    assert folders == [str(tmp_path / "sweep" / name / "digits" / "seed0") for name in ("gmh", "local")]


# --- files ---------------------------------------------------------------------------------------------------------


def with_diagnostics(run, described):
    """The run, in whose checkpoints other diagnostics are described."""

    def describe(writing):
        writing.about["run"]["diagnostics"] = json.dumps(described)

    for number in open_run(run).rounds:
        path = round_path(run, number)
        shutil.copy(path, run.parent / "before.h5")
        checked_hdf5.write(path, describe, copied=run.parent / "before.h5")
    return run


@pytest.mark.parametrize("name", ["/{folder}/mine", "../../mine", "a b", "Alpha", ""])
def test_a_diagnostic_whose_name_is_no_plain_one_is_named_and_no_file_lies_elsewhere(name, runs, tmp_path, capfd):
    name = name.format(folder=tmp_path)
    described = {name: {"kind": "Category", "title": "A", "server": "counts", "count": 2}}
    run = with_diagnostics(Path(shutil.copytree(runs / "gmh", tmp_path / "run")), described)
    before = {path for path in tmp_path.rglob("*")}
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 1
    assert f"a diagnostic is named {name!r}; names have lower-case letters" in capfd.readouterr().err
    assert all(path.is_relative_to(tmp_path / "out") for path in {*tmp_path.rglob("*")} - before)


def test_a_diagnostic_with_the_name_of_a_figure_does_not_take_its_place(tmp_path):
    run = tmp_path / "run"
    quick_run.run(quick_run.settings(algorithm={"name": "apfl"}, training={"rounds": 1}), run)
    names = "accuracy", "layer_cosines", "partition"
    with_diagnostics(run, {name: {"kind": "PerClient", "title": name, "kept": "alpha"} for name in names})
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    links = re.findall(r'href="(figures/[^"]+csv)"', (tmp_path / "out" / "report.html").read_text())
    assert len({*links}) == len(links)
    with open(tmp_path / "out" / "figures" / "client_accuracy.csv") as file:
        shown = {int(line["point"]): float(line["accuracy (%)"]) for line in csv.DictReader(file)}
    accuracy = open_run(run).round(1).metrics["accuracy"]
    assert shown == {client: pytest.approx(100 * accuracy[client]) for client in shown} and len(shown) > 2
    assert {f"figures/client_diagnostic-{name}.csv" for name in names} <= {*links}


def test_figures_with_the_same_name_have_a_file_each(tmp_path):
    plots = [
        Curves(name="beta", title=title, caption="", y_label="y", curves=(Curve("a", np.arange(2), np.arange(2.0)),))
        for title in ("first", "second")
    ]
    drawn = draw_figures(tmp_path, (), plots, "figures")
    assert [figure.path for figure in drawn if isinstance(figure, PageFigure)] == ["figures/beta", "figures/beta-2"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        *("beta-2.csv", "beta-2.svg"),
        *("beta.csv", "beta.svg"),
    ]


def test_figures_with_the_same_name_are_all_in_a_notebook(runs):
    charts = pflmpi.open_runs([runs / "gmh", runs / "other"]).figures.all()
    titles = [charts[name].to_dict()["title"] for name in ("partition", "partition-2")]
    assert [title.rpartition(" of ")[2] for title in titles] == ["fedgmh gmh", "fedgmh other"]


def test_pictures_are_made_where_they_are_asked_for(runs, tmp_path):
    assert main(["report", str(runs / "local"), "--out", str(tmp_path), "--png", "--pdf"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "figures/accuracy_over_rounds.png" in text and "figures/accuracy_over_rounds.pdf" in text
    assert main(["report", str(runs / "local"), "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in (tmp_path / "figures").rglob("*.*")} == {".csv", ".svg"}, "no older ones remain"


def test_a_report_made_again_replaces_its_files_which_stay_whole_until_then(runs, tmp_path):
    words = ["report", str(runs / "local"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    shutil.copytree(tmp_path / "out", tmp_path / "before", copy_function=os.link)
    assert main(words) == 0
    assert {path.stat().st_nlink for path in (tmp_path / "out").rglob("*.*")} == {1}, "another file each"


def test_a_page_is_made_without_altair_scikit_learn_and_scipy(runs, tmp_path):
    heavy = "altair", "sklearn", "scipy", "torch", "pandas", "PIL"
    statement = f"print(main(sys.argv[1:]), *[name for name in {heavy} if name in sys.modules])"
    words = ["report", str(runs / "gmh"), str(runs / "local"), "--out", str(tmp_path)]
    code = f"import sys; from pflmpi.cli import main; {statement}"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_a_report_looks_once_at_each_round_and_reads_one_metric_for_accuracies(runs, tmp_path, monkeypatch):
    looked, read = Counter[Path](), list[str]()
    check, get = verify.checkpoint, checked_hdf5.read_dataset

    def look(run, round, **options):
        looked[round_path(run, round)] += 1
        return check(run, round, **options)

    def note(group, path):
        if group.name == "/metrics":
            read.append(path)
        return get(group, path)

    monkeypatch.setattr(verify, "checkpoint", look)
    monkeypatch.setattr(checked_hdf5, "read_dataset", note)
    among = [open_run(runs / name) for name in ("gmh", "local")]
    for opened in among:
        check_shown(opened)
        assert read_main_by_round(opened, opened.main_measure) and make_run_figures(name_runs([opened])[0])
    assert len(looked) >= 6 and set(looked.values()) == {1}
    assert read.count("accuracy") == len(looked) and "hits" not in read


@pytest.mark.parametrize(
    ("place", "name"),
    [(Run, "metric"), (Run, "round"), (diagnostics, "plot_diagnostics"), (similarity, "plot_cosines")],
)
def test_a_round_that_is_pruned_while_a_report_is_made_is_no_damage(place, name, runs, tmp_path, monkeypatch):
    """It is listed, and gone when it is read, as in a run that is being written."""
    run, read = open_run(shutil.copytree(runs / "gmh", tmp_path / "run")), getattr(place, name)
    first, *later_rounds = run.rounds

    def prune_and_read(*args, **options):
        round_path(run.path, first).unlink(missing_ok=True)
        return read(*args, **options)

    monkeypatch.setattr(place, name, prune_and_read)
    check_shown(run)
    plots, problems = make_run_figures(name_runs([run])[0])
    assert problems == [] and not any(isinstance(plot, Missing) and "is missing" in plot.why for plot in plots)
    assert run.rounds == later_rounds

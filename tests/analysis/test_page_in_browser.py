"""A page in a real browser: it opens, says values below the pointer, sorts, shows a client; nothing is cut off."""

import json
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.figures import make_run_figures
from pflmpi.analysis.plots import Bars, Curves
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import name_runs
from pflmpi.analysis.series.clients import plot_single_clients
from pflmpi.cli import main
from pflmpi.store import partition_file

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
ASKED = """<script>
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const box = (title) => [...document.querySelectorAll("figure")]
  .find((figure) => figure.querySelector("h3").textContent === title)?.querySelector(".drawing");
const told = (item) => {
  item.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, view: window}));
  item.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, view: window}));
  return [...document.querySelectorAll("#vg-tooltip-element tr")].map((row) => row.textContent);
};
const items = (title, mark) => [...box(title).querySelectorAll(`.${mark} > *`)];
const asked = async () => {
  const result = {errors: []};
  addEventListener("error", ({message}) => result.errors.push(message));
  addEventListener("securitypolicyviolation", ({violatedDirective}) => result.errors.push(violatedDirective));
  const drawn = (drawing) => Boolean(drawing.querySelector(".marks"));
  const all = [...document.querySelectorAll("[data-chart]")], overview = document.querySelectorAll("#s2 [data-chart]");
  for (let turn = 0; turn < 600 && ![...overview].every(drawn); turn += 1) await wait(50);
  result.before = all.filter(drawn).length - overview.length;
  for (const part of document.querySelectorAll("details")) part.open = true;
  for (let turn = 0; turn < 600 && !all.every(drawn); turn += 1) await wait(50);
  result.drawn = all.map(drawn);
  result.wide = document.documentElement.scrollWidth;
  result.line = told(items("Accuracy over rounds", "hover_marks")[0]);
  const figure = box("Accuracy over rounds"), inside = (kind) => [...figure.querySelectorAll(kind)];
  const legend = figure.querySelector(".role-legend-symbol path");
  for (const kind of ["pointerdown", "pointerup", "click"])
    legend.dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window}));
  await wait(200);
  result.picked = inside(".picking_marks path").map((item) => Number(item.getAttribute("opacity") ?? 1));
  const axis = () => inside(".role-axis-label text").map((text) => text.textContent).join();
  const before = axis(), ground = figure.querySelector(".background"), place = ground.getBoundingClientRect();
  const [clientX, clientY] = [place.left + place.width / 2, place.top + place.height / 2];
  const wheel = (ctrlKey) => ground.dispatchEvent(
    new WheelEvent("wheel", {bubbles: true, cancelable: true, view: window, deltaY: -500, ctrlKey, clientX, clientY}));
  result.scrolls = wheel(false); // and is not taken from the page
  await wait(200);
  result.same = before === axis();
  wheel(true);
  await wait(200);
  result.zoomed = before !== axis();
  result.cell = told(items("The partition", "concat_0_layer_0_marks")[0]);
  const point = items("Distribution over clients at the end", "hover_marks")[6];
  const client = point.__data__.datum.client;
  result.client = client;
  for (const kind of ["pointerdown", "pointerup", "click"])
    point.dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window}));
  await wait(400);
  result.chosen = Number(document.getElementById("client").value);
  const shown = items("Accuracy of a client", "layer_1_marks").map((item) => item.__data__.datum);
  result.shown = shown.map(({series, client, x, y}) => [series, client, x, y]);
  const best = [...document.querySelectorAll("thead th")].find((head) => head.textContent === "best (%)");
  const column = [...best.parentElement.cells].indexOf(best), rows = best.closest("table").tBodies[0].rows;
  result.sorted = [0, 1].map(() => { best.click(); return [...rows].map((row) => row.cells[column].textContent); });
  result.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  return result;
};
addEventListener("load", () => asked().catch((error) => ({errors: [error.stack]}))
  .then((result) => parent.postMessage(JSON.stringify(result), "*")));
</script></body>"""
WIDE = """<script>
const wide = [...document.querySelectorAll(".wide")];
const columns = () => [...document.querySelectorAll("#s1 thead th")].filter((one) => one.offsetWidth).length;
const shown = [columns()];
document.getElementById("columns").click();
shown.push(columns());
const hidden = wide.map((one) => one.scrollWidth - one.clientWidth);
const lines = Math.max(...[...document.querySelectorAll("#s1 td")].map((one) => one.offsetHeight));
parent.postMessage(JSON.stringify({hidden, lines, shown}), "*");
</script></body>"""
AROUND = """<!DOCTYPE html><pre id="result"></pre><iframe src="page.html" width="400" height="900"></iframe>
<script>onmessage = ({data}) => { document.getElementById("result").textContent = data; };</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), folder / "gmh")
    quick_run.run(quick_run.settings(algorithm={"name": "local"}, checkpoint={"keep": 0}), folder / "local")
    return [folder / "gmh", folder / "local"]


def test_what_is_shown_of_a_client_is_its_own(runs):
    among = name_runs([open_run(path) for path in runs])
    accuracy, layers, samples = plot_single_clients(among, [make_run_figures(named)[0] for named in among])
    run, other = (named.run for named in among)
    assert isinstance(accuracy, Curves) and isinstance(layers, Curves) and isinstance(samples, Bars)
    curve = next(candidate for candidate in accuracy.curves if (candidate.label, candidate.client) == ("fedgmh", 3))
    assert curve.y.tolist() == [100 * run.round(int(number)).metrics["accuracy"][3] for number in curve.x]
    counts = partition_file.read(other.path)
    own = {label: counts.train[3, int(label)] for label in map(str, range(10)) if counts.train[3, int(label)]}
    assert {name: count for client, _, name, part, count in samples.bars if (client, part) == (3, "training")} == own
    heads = np.concatenate(
        [np.asarray(run.round(3).clients[f"model/head/{name}"]).reshape(7, -1) for name in ("bias", "weight")], 1
    )
    unit = heads / np.linalg.norm(heads, axis=1, keepdims=True)
    mean_similarity = (unit @ unit[3])[[0, 1, 2, 4, 5, 6]].mean()
    similar = next(candidate for candidate in layers.curves if (candidate.label, candidate.client) == ("fedgmh", 3))
    assert similar.y[layers.x_names.index("head")] == pytest.approx(mean_similarity, rel=1e-6)


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
def test_a_page_opens_in_a_browser_and_answers_and_fetches_nothing(runs, tmp_path):
    assert main(["report", *map(str, runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "page.html").write_text(with_script(text, ASKED))
    (tmp_path / "around.html").write_text(AROUND)
    state = opened(tmp_path / "around.html", tmp_path)
    first = open_run(runs[0])
    assert state["errors"] == [] and len(state["drawn"]) >= 10 and all(state["drawn"]), "Vega has drawn each figure"
    assert state["before"] == 0, "what is folded is drawn when it is opened"
    assert state["line"][0] == "round1" and len(state["line"]) == 3, "all runs of the round"
    for text, run in zip(state["line"][1:], (first, open_run(runs[1])), strict=True):
        accuracy = float(text.removeprefix(run.name))
        assert accuracy == pytest.approx(100 * run.columns["accuracy_mean"][0], abs=0.05)
    assert sorted(state["picked"]) == [0, 1], "a click in the legend hides the others"
    assert state["scrolls"] and state["same"] and state["zoomed"], "the wheel zooms with Ctrl alone"
    counts = partition_file.read(first.path)
    label = int(np.flatnonzero(counts.train[0])[0])
    assert state["cell"] == ["client0", f"class {label}", f"samples{counts.train[0, label]}"]
    client = state["client"]
    assert state["chosen"] == client, "a click on a client chooses it"
    expected = [
        [run.name, client, number, pytest.approx(100 * run.round(number).metrics["accuracy"][client], rel=1e-4)]
        for run in (first, open_run(runs[1]))
        for number in run.rounds
        if number
    ]
    assert [entry for entry in state["shown"] if entry[2]] == expected
    falling, rising = state["sorted"]
    best = sorted(f"{100 * np.nanmax(open_run(path).columns['accuracy_mean']):.2f}" for path in runs)
    assert rising == best and falling == best[::-1]
    assert state["fetched"] == [] and state["wide"] <= 400


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
def test_a_client_that_one_of_the_runs_does_not_have_is_shown_of_the_others(runs, tmp_path):
    quick_run.run(quick_run.settings(evaluation={"unseen": 0.4}, seed=9), tmp_path / "fewer")
    assert main(["report", str(runs[0]), str(tmp_path / "fewer"), "--out", str(tmp_path)]) == 0
    chosen = """<script>
    const errors = [];
    addEventListener("error", ({message}) => errors.push(message));
    addEventListener("load", async () => {
      const choice = document.getElementById("client"), wait = (time) => new Promise((done) => setTimeout(done, time));
      const all = [...document.querySelectorAll("[data-chart]")];
      for (const part of document.querySelectorAll("details")) part.open = true;
      for (let turn = 0; turn < 600 && !all.every((one) => one.querySelector(".marks")); turn += 1) await wait(50);
      choice.value = "6";
      choice.dispatchEvent(new Event("change"));
      await wait(400);
      const figure = all.find((one) => one.closest("figure").textContent.includes("Accuracy of a client"));
      const points = [...figure.querySelectorAll(".layer_1_marks > *")].map((item) => item.__data__.datum);
      parent.postMessage(JSON.stringify({errors, clients: points.map(({client}) => client)}), "*");
    });
    </script></body>"""
    (tmp_path / "page.html").write_text(with_script((tmp_path / "report.html").read_text(), chosen))
    (tmp_path / "around.html").write_text(AROUND)
    state = opened(tmp_path / "around.html", tmp_path)
    assert state["errors"] == [] and state["clients"] and set(state["clients"]) == {6}, state


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
def test_no_table_is_cut_off_at_1400_pixels(runs, tmp_path):
    assert main(["report", *map(str, runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "page.html").write_text(with_script(text, WIDE))
    (tmp_path / "around.html").write_text(AROUND.replace('width="400"', 'width="1400"'))
    state = opened(tmp_path / "around.html", tmp_path)
    assert len(state["hidden"]) == 2 and max(state["hidden"]) == 0 and state["lines"] < 40, "no row has two lines"
    assert state["shown"][0] == 8 < state["shown"][1], "further columns are shown to a reader who asks, without script"


def with_script(text, script):
    """A page with one more script at its end; its own scripts have "</body>" in a text."""
    before, _, after = text.rpartition("</body>")
    return before + script + after


def opened(page, folder):
    """What the script of a page says, in a browser that draws it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [str(BROWSER), *options, "--virtual-time-budget=60000", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (result,) = re.findall(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(unescape(result)))

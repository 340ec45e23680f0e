"""A page in a real browser: it opens, says values below the pointer, sorts, shows a client; nothing is cut off."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quick_run
from pflmpi.analysis.page.clients import clients
from pflmpi.analysis.page.contents import detailed
from pflmpi.analysis.run import open_run
from pflmpi.analysis.selection import named
from pflmpi.cli import main
from pflmpi.store import partition_file

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
ASKED = """<script>
const result = {wide: document.documentElement.scrollWidth};
const drawing = (title) => [...document.querySelectorAll("svg[data-hover]")]
  .find((svg) => svg.getAttribute("aria-label").startsWith(title));
const point = (svg, x, y, kind) => {
  const {x: clientX, y: clientY} = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new PointerEvent(kind, {clientX, clientY, bubbles: true}));
  return document.getElementById("said").textContent;
};
const lines = drawing("Accuracy over rounds"), path = lines.querySelector("path[data-label]");
result.line = point(lines, ...path.getAttribute("d").match(/[\\d.]+/g).slice(0, 2).map(Number), "pointermove");
const cells = drawing("The partition"), {x, y} = JSON.parse(cells.dataset.hover);
result.cell = point(cells, x[0] + 1, y[1] + 1, "pointermove");
result.part = point(drawing("Time per round"), x[1] - 1, 100, "pointermove");
point(cells, x[0] + 1, y[0] - 1, "click");
result.client = document.getElementById("client").innerText;
const heads = [...document.querySelectorAll("thead th")], best = heads.find((head) => head.textContent === "best (%)");
const column = [...best.parentElement.cells].indexOf(best), rows = best.closest("table").tBodies[0].rows;
result.sorted = [0, 1].map(() => { best.click(); return [...rows].map((row) => row.cells[column].textContent); });
result.text = Math.min(...[...document.querySelectorAll("svg[data-hover]")].map((svg) => 12 * svg.getScreenCTM().a));
result.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
parent.postMessage(JSON.stringify(result), "*");
</script></body>"""
WIDE = """<script>
const wide = [...document.querySelectorAll(".wide")];
const hidden = wide.map((one) => one.scrollWidth - one.clientWidth);
const lines = Math.max(...[...document.querySelectorAll("td")].map((one) => one.offsetHeight));
parent.postMessage(JSON.stringify({hidden, lines}), "*");
</script></body>"""
AROUND = """<!DOCTYPE html><pre id="result"></pre><iframe src="page.html" width="400" height="900"></iframe>
<script>onmessage = ({data}) => { document.getElementById("result").textContent = data; };</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    quick_run.run(quick_run.settings(checkpoint={"keep": 0}), folder / "gmh")
    quick_run.run(quick_run.settings(algorithm={"name": "local"}, checkpoint={"keep": 0}), folder / "local")
    return [folder / "gmh", folder / "local"]


def test_what_is_shown_of_a_client_is_its_own(runs: list[Path]) -> None:
    among = named([open_run(path) for path in runs])
    found = clients(among, [detailed(one)[0] for one in among])
    assert found is not None and found["clients"] == 7 and len(found["counts"]) == 1, "one partition"
    run, other = (one.run for one in among)
    (gmh, local) = found["runs"]
    (accuracy,) = gmh["trajectories"]
    for place, number in enumerate(accuracy["rounds"]):
        expected = 100 * run.round(number).metrics["accuracy"][3]
        assert accuracy["values"][3][place] == pytest.approx(expected, rel=1e-3)
    counts = partition_file.read(other.path)
    assert counts is not None and found["counts"][local["counts"]]["train"][3] == counts.train[3].tolist()
    (measure,) = gmh["layers"]
    heads = np.concatenate(
        [np.asarray(run.round(3).clients[f"model/head/{name}"]).reshape(7, -1) for name in ("bias", "weight")], 1
    )
    unit = heads / np.linalg.norm(heads, axis=1, keepdims=True)
    others = (unit @ unit[3])[[0, 1, 2, 4, 5, 6]].mean()
    assert "cosine" in measure and gmh["layers"][measure]["head"]["3"] == pytest.approx(others, rel=1e-3)


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
def test_a_page_opens_in_a_browser_and_answers_and_fetches_nothing(runs: list[Path], tmp_path: Path) -> None:
    assert main(["report", *map(str, runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    (tmp_path / "page.html").write_text(text.replace("</body>", ASKED))
    (tmp_path / "around.html").write_text(AROUND)
    found = opened(tmp_path / "around.html", tmp_path)
    first = open_run(runs[0])
    label, round, accuracy = found["line"].splitlines()
    assert (label, round) == ("fedgmh", "round: 1")
    assert float(accuracy.rpartition(": ")[2]) == pytest.approx(100 * first.columns["accuracy_mean"][0], abs=0.05)
    counts = partition_file.read(first.path)
    assert counts is not None
    assert found["cell"].splitlines() == ["client 0, class 0", f"samples: {counts.train[0, 0] or 'none'}"]
    assert "communication: " in found["part"] and "round: 3" in found["part"]
    held = [f"{label}\t{counts.train[6, label]}\t{counts.test[6, label]}" for label in np.flatnonzero(counts.train[6])]
    assert all(line in found["client"] for line in held) and "Layers: mean cosine" in found["client"]
    falling, rising = found["sorted"]
    best = sorted(f"{100 * np.nanmax(open_run(path).columns['accuracy_mean']):.2f}" for path in runs)
    assert rising == best and falling == best[::-1]
    assert found["fetched"] == [] and found["wide"] <= 400 and found["text"] >= 10


@pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
def test_no_table_is_cut_off_at_1400_pixels(runs: list[Path], tmp_path: Path) -> None:
    """Neither that of the runs, whose folders have long names, nor the layers of a client in six runs."""
    assert main(["report", *map(str, runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    (data,) = re.findall(r'id="clients">(.*?)</script>', text)
    found = json.loads(data)
    found["runs"] = [{**found["runs"][0], "label": f"algorithm{i}"} for i in range(6)]
    text = text.replace(data, json.dumps(found))
    (tmp_path / "page.html").write_text(text.replace("</body>", WIDE))
    (tmp_path / "around.html").write_text(AROUND.replace('width="400"', 'width="1400"'))
    found = opened(tmp_path / "around.html", tmp_path)
    assert len(found["hidden"]) == 3 and max(found["hidden"]) == 0 and found["lines"] < 40, "no row has two lines"


def opened(page: Path, folder: Path) -> dict[str, Any]:
    """What the script of a page says, in a browser that draws it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [str(BROWSER), *options, "--virtual-time-budget=5000", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (said,) = re.findall(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(unescape(said)))

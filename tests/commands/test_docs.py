"""`pflmpi docs`: the documentation that comes with the package."""

import pytest

from pflmpi.cli import main
from project import ROOT

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_it_lists_every_page_with_its_title(capfd):
    assert main(["docs"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == PAGES
    assert "gpus" in PAGES and next(line.split(maxsplit=1)[1] for line in lines if line.startswith("gpus ")) == "GPUs"


def test_it_prints_a_page_as_it_is(capfd):
    assert main(["docs", "networks"]) == 0
    assert capfd.readouterr().out.strip() == (ROOT / "docs" / "networks.md").read_text().strip()


def test_another_page_is_refused_with_those_that_there_are(capfd):
    with pytest.raises(SystemExit) as ended:
        main(["docs", "gpu"])
    assert ended.value.code == 2 and "'networks'" in capfd.readouterr().err

"""Runs that several test files read."""

from pathlib import Path
from typing import Any

import pytest

import quick_run
from pflmpi.store import checked_hdf5
from pflmpi.store.records import background, conversion
from pflmpi.store.round_file import RoundContent


@pytest.fixture(scope="session")
def older_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose files do not describe themselves, as an earlier pflmpi wrote them (format 1)."""
    folder = tmp_path_factory.mktemp("older") / "run"
    write = conversion.write_round

    def write_as_before(run: Path, content: Any, layout: Any, templates: Any, attributes: Any, *checksums: Any) -> Any:
        content = RoundContent(content.round, content.server, content.metrics, content.bytes)
        former = {name: value for name, value in attributes.items() if name not in ("personal", "diagnostics")}
        return write(run, content, layout, templates, former, *checksums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_hdf5, "FORMAT_VERSION", 1)
        patch.setattr(conversion, "write_round", write_as_before)
        patch.setattr(background, "_AFTER", 600.0)  # so that this process writes them
        quick_run.run(quick_run.settings(), folder)
    return folder

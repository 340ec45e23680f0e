"""`pflmpi examples`: what the documentation uses, written into a folder."""

import errno
import os
import shutil
from pathlib import Path

from pflmpi.cli import main
from project import ROOT

KINDS = ("configs", "examples", "launch", "slurm")
OF_A_CHECKOUT = {"environment", "quickstart", "test", "gpu-check"}  # they install the checkout that they lie in


def files(folder):
    paths = (path for kind in KINDS for path in (folder / kind).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}


def test_it_writes_what_the_documentation_uses_and_overwrites_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "."]) == 0
    assert "pflmpi run configs/quickstart.yaml" in capfd.readouterr().out
    assert files(Path()) == files(ROOT) - {f"launch/{name}" for name in OF_A_CHECKOUT}
    for name in files(Path()):
        assert Path(name).read_bytes() == (ROOT / name).read_bytes()
        assert os.access(name, os.X_OK) == os.access(ROOT / name, os.X_OK), name

    Path("configs/quickstart.yaml").write_text("seed: 2\n")
    assert main(["examples", "."]) == 2
    assert "configs exists already; choose another folder" in capfd.readouterr().err
    assert Path("configs/quickstart.yaml").read_text() == "seed: 2\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert main(["examples", str(tmp_path / "file" / "below")]) == 2
    shown = capfd.readouterr().err
    assert str(tmp_path / "file") in shown and "internal error" not in shown


def test_on_a_full_disk_nothing_is_left_and_the_same_command_writes_them_later(tmp_path, monkeypatch, capfd):
    copy, left = shutil.copyfile, iter(range(12, 0, -1))

    def copy_until_full(source, target, **options):
        if next(left, 0) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return copy(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy_until_full)
        assert main(["examples", str(tmp_path / "ex")]) == 2
    shown = capfd.readouterr().err
    assert "No space left on device; free space, or choose another folder" in shown and "internal error" not in shown
    assert [*(tmp_path / "ex").iterdir()] == []
    assert main(["examples", str(tmp_path / "ex")]) == 0

"""`launch/pack`: an environment in one file, used from another place."""

import os
import sys

import pytest

import processes
from project import ROOT

SRUN = 'while [ "$1" != sh ]; do shift; done; "$@"'  # one node


@pytest.mark.slow
def test_a_packed_environment_works_from_the_disks_of_the_nodes_until_the_job_ends(tmp_path):
    made = processes.call([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")])
    assert made.returncode == 0, made.stderr
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "__editable__.pflmpi.pth").write_text(f"{ROOT}\n")
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("sbcast", 'cp "$2" "$3"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"VIRTUAL_ENV": f"{tmp_path}/env", "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    packed = processes.call([str(ROOT / "launch" / "pack"), "an env.tar"], env=variables, cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    (tmp_path / "env").rename(tmp_path / "gone")

    where = 'python -c "import sys; print(sys.prefix)"'
    show = f'"$python" -c "import pflmpi; print(pflmpi.__file__)"; {where}'
    show += '; "$python" -m pflmpi examples here > /dev/null'
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PFLMPI_LOCAL": str(tmp_path)}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **job}
    del variables["VIRTUAL_ENV"]
    done = processes.call(["bash", "-c", f". '{tmp_path}/an env.setup'; {show}"], env=variables, cwd=tmp_path)
    copy = tmp_path / "pflmpi-7"
    package = copy / site.relative_to(tmp_path / "env") / "pflmpi" / "__init__.py"
    assert done.stdout.splitlines() == [str(package), str(copy)], done.stderr
    assert (tmp_path / "here" / "configs" / "quickstart.yaml").is_file(), "what pflmpi includes is packed too"
    assert not copy.exists(), "nothing is left on the nodes"


def test_what_is_packed_is_named(tmp_path):
    for words in (["env.zip"], ["a.tar", "b.tar"], []):
        assert processes.call([str(ROOT / "launch" / "pack"), *words], cwd=tmp_path).returncode == 2

"""A run imports no more than it needs: each of these packages takes a second or two of processor time in every rank."""

import subprocess
import sys

from project import ROOT

RUN = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/helpers")
import quick_run
raw = quick_run.settings(training={"rounds": 1, "epochs": 9}, runtime={"executor": "lanes"})
quick_run.run(raw, Path(sys.argv[1]) / "run")
heavy = {"sklearn", "scipy", "sympy", "torch._dynamo", "torchvision", "altair", "vl_convert", "pandas", "tensorboard"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_a_run_in_lanes_imports_neither_scikit_learn_nor_the_compiler_of_pytorch(tmp_path):
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

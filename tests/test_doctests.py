"""The examples in docstrings are true."""

import doctest
from importlib import import_module
from pathlib import Path

from project import ROOT

NOT_IMPORTED = {"pflmpi.__main__", "pflmpi.transports.mpi"}  # they start something


def test_every_example_in_a_docstring_is_true():
    failed, tried = [], 0
    for path in sorted((ROOT / "pflmpi").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name in NOT_IMPORTED or ">>>" not in Path(path).read_text():
            continue
        result = doctest.testmod(import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
        tried += result.attempted
        failed += [name] if result.failed else []
    assert tried > 50 and not failed

"""Fields of an own class, and parameters of an own partition: what is refused, and how they are shown."""

import pytest

import own_code
import quick_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.errors import ConfigError, PflmpiError

IMPORTS = "from dataclasses import field\nfrom typing import Annotated\nfrom pydantic import Field\n"


def with_field(folder, line):
    """A configuration with an own algorithm of one more field, and what names the algorithm."""
    config = own_code.write(folder, algorithm={"name": "./mine.py:Mine"})
    (folder / "mine.py").write_text(IMPORTS + own_code.ALGORITHM + f"    {line}\n")
    return config, f"{folder}/mine.py:Mine"


def refused_everywhere(config, name, expected, capfd):
    """`run` and `list` refuse it with the same line."""
    with pytest.raises(ConfigError) as raised:
        configuration.load(config)
    assert expected in str(raised.value) and "\n" not in str(raised.value)
    assert main(["list", name]) == 2
    output, error = capfd.readouterr()
    assert not output and expected in " ".join(error.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lam: Annotated[float, Field(ge=0)] = -1.0", "Mine.lam = -1.0: must be greater than or equal to 0"),
        ("lam: float = Field(-1.0, ge=0)", "Mine.lam = -1.0: must be greater than or equal to 0"),
        ('lam: int = "a"', "Mine.lam = 'a': must be a valid integer; change its default"),
        ("lam: float = None", "Mine.lam = None: must be a valid number"),
        ('lam: float = float("inf")', "Mine.lam = inf: no option takes such a number; must be at most 3.4e+38"),
        ("lam: list[int] = field(default_factory=lambda: [0.5])", "Mine.lam.0 = 0.5: must be a valid integer"),
    ],
)
def test_a_default_that_no_configuration_could_set_is_refused(line, expected, tmp_path, capfd):
    config, name = with_field(tmp_path, line)
    refused_everywhere(config, name, expected, capfd)


def test_a_default_of_a_partition_is_checked_too(tmp_path, capfd):
    config = own_code.write(tmp_path)
    (tmp_path / "in_turn.py").write_text(own_code.PARTITION.replace("step: int = 1", 'step: int = "a"'))
    expected = "in_turn.step = 'a': must be a valid integer; change its default"
    refused_everywhere(config, f"{tmp_path}/in_turn.py:in_turn", expected, capfd)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("lam: tuple[int, ...] = (1, 2)", "tuple[int, ...]"),
        ("lam: dict[str, float] = field(default_factory=dict)", "dict[str, float]"),
        ("lam: dict | None = None", "dict"),
        ("lam: list[tuple[int, int]] = field(default_factory=list)", "tuple[int, int]"),
        ("lam: set[int]", "set[int]"),
    ],
)
def test_a_field_of_a_type_that_no_key_can_have_is_refused(line, kind, tmp_path, capfd):
    config, name = with_field(tmp_path, line)
    expected = f"Mine.lam is a {kind}, which no key can be; expected a number, text, true, false, null, or a list"
    refused_everywhere(config, name, expected, capfd)


def test_a_default_that_a_function_makes_is_shown(tmp_path, capfd):
    config, name = with_field(tmp_path, "lam: list[float] = field(default_factory=list)")
    assert configuration.load(config).resolved()["algorithm"]["lam"] == []
    assert main(["list", name]) == 0
    output = capfd.readouterr().out
    assert "[]" in output and "Undefined" not in output and "list[float]" in output


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_an_assignment_to_self_is_named_where_it_stands(executor, tmp_path):
    config = own_code.write(tmp_path, algorithm={"name": "./mine.py:Mine"}, runtime={"executor": executor})
    method = "def client_update(self, task, client, down, data):\n        self.seen = 1\n"
    (tmp_path / "mine.py").write_text(own_code.ALGORITHM + f"\n    {method}")
    with pytest.raises(PflmpiError) as raised:
        quick_run.run(configuration.load(config).resolved(), tmp_path / "run")
    line = (tmp_path / "mine.py").read_text().split("\n").index("        self.seen = 1") + 1
    assert f"at {tmp_path}/mine.py:{line}, in Mine.client_update" in str(raised.value)
    assert "what a client keeps belongs in its state (`init_client`)" in str(raised.value)


@pytest.mark.parametrize("first", ["labels", "writers"])
def test_only_the_keys_of_a_partition_need_types(first, tmp_path, capfd):
    config = own_code.write(tmp_path)
    file, name = tmp_path / "in_turn.py", f"{tmp_path}/in_turn.py:in_turn"
    body = "\n    return [np.arange(client, 100, clients * step) for client in range(clients)]\n"
    file.write_text(f"import numpy as np\ndef in_turn({first}, clients, rng, *, step: int = 1):" + body)
    assert configuration.load(config).resolved()["partition"] == {"name": name, "clients": 5, "step": 1}
    assert main(["list", name]) == 0 and "clients" in capfd.readouterr().out
    file.write_text(f"import numpy as np\ndef in_turn({first}, clients, rng, *, step=1):" + body)
    refused_everywhere(config, name, "in_turn: step has no type; expected step: int, or float, bool, str,", capfd)

"""The examples work as written: the one that reads a run, the one on text, and those on adapters."""

import os
import runpy
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

import processes
import quick_run
from comparisons import state_of
from pflmpi.analysis.run import open_run
from pflmpi.cli import main
from pflmpi.config import load as configuration
from pflmpi.data.own_files import read_own
from project import ROOT

SCRIPT = ROOT / "examples" / "read_a_run.py"


def read(run):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_it_has_cells():
    assert SCRIPT.read_text().count("\n# %% ") >= 5


def test_it_shows_what_is_in_the_run(tmp_path):
    quick_run.run(quick_run.settings(), tmp_path / "run")
    code, lines = read(tmp_path / "run")
    run = open_run(tmp_path / "run")
    mean = run.columns["accuracy_mean"]
    assert code == 0, lines
    assert any(line.startswith(f"best round: {mean.argmax() + 1}, mean accuracy {mean.max():.4f}") for line in lines)
    weights = np.asarray(run.round().clients["model/head/weight"]).reshape(7, -1)
    apart = np.linalg.norm(weights - weights[0], axis=1)
    nearest = apart[1:].argmin() + 1
    assert f"client 0: nearest is client {nearest}, {apart[nearest]:.4f} away" in lines


@pytest.mark.parametrize("absent", ["latest", "last_received"])
def test_it_says_so_where_clients_keep_no_heads(tmp_path, absent):
    raw = quick_run.settings(algorithm={"name": "fedavg"}, evaluation={"absent": absent}, training={"rounds": 1})
    quick_run.run(raw, tmp_path / "run")
    code, lines = read(tmp_path / "run")
    if absent == "latest":
        assert code == 1 and lines[-1].startswith("the clients of this run keep no heads")
    else:
        assert code == 0 and any("received/model/head/weight" in line for line in lines)


EXAMPLE = ROOT / "examples" / "text.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.npz"
    code = runpy.run_path(str(EXAMPLE))
    several = code["texts"]()
    assert len(several) >= 8 and all(len(text) > 500 for text in several)
    code["write"](path, several, every=40)
    return path


def settings(data, executor, rounds):
    raw = configuration.located(configuration.read(EXAMPLE.with_suffix(".yaml")), EXAMPLE.parent)
    training = {**raw["training"], "rounds": rounds, "batch_size": 10}
    return {**raw, "data": {"path": str(data)}, "training": training, "runtime": {"executor": executor}}


def test_samples_are_windows_of_the_texts(data):
    code = runpy.run_path(str(EXAMPLE))
    dataset = read_own(data)
    first = code["tokens"](code["texts"]()[0])
    assert dataset.images.shape[1:] == (code["LENGTH"],) and dataset.num_classes <= 28
    assert np.array_equal(dataset.images[1], first[40 : 40 + code["LENGTH"]])
    assert np.array_equal(code["tokens"]("A  b\n\u00e9Z"), [1, 0, 2, 0, 27, 26])


def test_any_number_of_ranks_and_a_resumed_run_give_the_same_bits(data, tmp_path):
    executor = "lanes"
    digest = quick_run.run(settings(data, executor, 3), tmp_path / "one")
    assert quick_run.run(settings(data, executor, 3), tmp_path / "three", ranks=3) == digest
    quick_run.run(settings(data, executor, 1), tmp_path / "short")
    assert quick_run.resume(tmp_path / "short", ("training.rounds=3",), ranks=2) == digest
    losses = open_run(tmp_path / "one").columns["train_loss"]
    assert losses[-1] < losses[0] < np.log(28) + 1


def test_the_configuration_is_valid_where_the_data_is(data, tmp_path):
    for file in (EXAMPLE, EXAMPLE.with_suffix(".yaml")):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "text.npz").write_bytes(data.read_bytes())
    config = configuration.load(tmp_path / "text.yaml")
    assert config.data.path == str(tmp_path / "text.npz")
    assert yaml.safe_load((tmp_path / "text.yaml").read_text())["partition"] == {"name": "writers"}


def test_adapters_are_trained_on_the_network_that_was_trained_before(tmp_path, monkeypatch):
    """The commands of the example, as written."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "examples" / "adapters.py").read_text()
    for line in [line.strip() for line in text.splitlines() if line.startswith("    pflmpi ")]:
        options = ["--ranks", "1", "-s", "training.rounds=2"] if " run " in line else []
        done = processes.call([*processes.PFLMPI, *shlex.split(line)[1:], *options])
        assert done.returncode == 0, done.stderr
    network = torch.load(tmp_path / "examples" / "backbone.pt", weights_only=True)
    assert main(["export", "runs/adapters", "--client", "3", "-o", "three.pt"]) == 0
    adapted = torch.load(tmp_path / "three.pt", weights_only=True)
    assert torch.equal(adapted["second.weight"], network["second.weight"]) and adapted["second.lora_b"].any()
    kept = open_run(tmp_path / "runs" / "adapters").round().clients
    assert {path for path in kept} >= {"body/first/lora_a", "body/second/lora_b"}


def test_very_many_clients_are_a_run_like_any_other(tmp_path):
    example = ROOT / "examples" / "many_clients.py"
    for file in (example, example.with_suffix(".yaml")):
        shutil.copy(file, tmp_path)
    runpy.run_path(str(example))["write"](tmp_path / "many_clients.npz", 3000)
    raw = configuration.located(configuration.read(tmp_path / "many_clients.yaml"), tmp_path)
    raw["training"] |= {"rounds": 2, "participation": 0.01}
    digest = quick_run.run(raw, tmp_path / "one")
    assert quick_run.run(raw, tmp_path / "two", ranks=2) == digest
    run = open_run(tmp_path / "one")
    assert run.round().metrics["total"].tolist() == [1] * 3000


@pytest.fixture
def pretrained(tmp_path):
    """The example on networks of `transformers`: its module, and its configuration for a short run."""
    for suffix in (".py", ".yaml"):
        shutil.copy(ROOT / "examples" / f"pretrained{suffix}", tmp_path)
    raw = configuration.located(configuration.read(tmp_path / "pretrained.yaml"), tmp_path)
    raw = quick_run.settings(raw, training={"rounds": 3}, runtime={"executor": "lanes", "lanes": 2})
    raw["partition"]["clients"], raw["data"]["limit"] = 6, 300
    return runpy.run_path(str(tmp_path / "pretrained.py")), raw


def test_adapters_on_attention_of_images_have_the_same_bits(pretrained, tmp_path):
    module, raw = pretrained
    module["write"](tmp_path / "vit")
    digest = quick_run.run(raw, tmp_path / "one")
    quick_run.run(quick_run.settings(raw, training={"rounds": 1}), tmp_path / "three", ranks=3)
    assert quick_run.resume(tmp_path / "three", ("training.rounds=3",), ranks=2) == digest
    assert {path.rpartition("/")[2] for path in state_of(tmp_path / "one") if "body" in path} == {"lora_a", "lora_b"}


def test_adapters_on_attention_of_texts_in_lanes_are_those_of_a_loop(pretrained, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    module, raw = pretrained
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=5, **sizes)
    BertForSequenceClassification(config).bfloat16().save_pretrained(tmp_path / "bert")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "texts.npz", x=rng.integers(0, 30, (90, 12)), y=np.arange(90) % 3)
    model = {**raw["model"], "name": f"{tmp_path}/pretrained.py:Texts", "folder": "bert"}
    raw |= {"data": {"path": f"{tmp_path}/texts.npz"}, "model": model, "partition": {"name": "iid", "clients": 6}}
    for executor in ("lanes", "loop"):
        quick_run.run(quick_run.settings(raw, runtime={"executor": executor}), tmp_path / executor)
    for path, array in state_of(tmp_path / "loop").items():
        np.testing.assert_allclose(array, state_of(tmp_path / "lanes")[path], atol=1e-5, err_msg=path)
    assert main(["export", str(tmp_path / "lanes"), "--client", "3", "-o", str(tmp_path / "three.pt")]) == 0
    module["Texts"](3, tmp_path / "bert").load_state_dict(torch.load(tmp_path / "three.pt", weights_only=True))

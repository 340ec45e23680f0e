"""Transforms of training samples: what they do, and the same bits on any number of ranks, in lanes, resumed."""

import numpy as np
import pytest
import torch
import yaml

import quick_run
from pflmpi.cli import main
from pflmpi.data.dataset import assemble
from pflmpi.errors import CheckpointError, ConfigError
from pflmpi.experiment.restore import reopen
from pflmpi.learning.replay import without_replay
from pflmpi.learning.task import Task
from pflmpi.learning.training import TrainingConfig
from pflmpi.learning.transforms import Transform, horizontal_flip, load_transform, random_crop
from pflmpi.models import MODELS
from pflmpi.runtime.executors.batches import ClientBatches, LaneBatches, Pool
from pflmpi.store import config_file

BOTH = ["random_crop", "horizontal_flip"]
OWN = """
import numpy as np
import torch
from pflmpi.models.noise import uniform

def darker(x, key):
    \"\"\"Darker by up to a half.\"\"\"
    return (x * (1 - uniform(key, (len(x), 1, 1, 1)) / 2)).to(x.dtype)

def floats(x, key):
    return x.float()

def own_draws(x, key):
    return torch.randint(0, 255, x.shape).to(x.dtype)

def centred(x, key):
    return (x - x.float().mean(0)).to(x.dtype)

def mixed(x, key):
    share = uniform(key, (len(x), 1, 1, 1)) / 2 * (uniform(key, (1,)) < 0.3)
    return (x + share * (x.roll(1, 0).float() - x)).to(x.dtype)

def fails(x, key):
    return x[0, 0, 99]

RNG = np.random.default_rng(1)

def blanks_some(x, key):
    x[torch.from_numpy(RNG.random(len(x)) < 0.05)] = 0
    return x

def blanks_rarely(x, key):
    return torch.zeros_like(x) if torch.rand(()) < 1e-6 else x

PATTERNS = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
NETWORK = []

def of_a_batch(x, key):
    return torch.where(PATTERNS[:len(x)] > 0, PATTERNS[:len(x)], x)

def made_at_first(x, key):
    if not NETWORK:
        NETWORK.append(torch.nn.Linear(8, 8, bias=False).requires_grad_(False))
        torch.nn.init.eye_(NETWORK[0].weight)
    return NETWORK[0](x.float()).to(x.dtype)

def seeded_by_key(x, key):
    np.random.default_rng(int(key))
    return x

def counted(x, key):
    with open("calls", "a") as file:
        file.write("x")
    return x

def looks_at_key(x, key):
    return x.flip(-1) if key.item() % 2 else x
"""


def settings(executor="loop", transform=BOTH, **sections):
    changes = {"data": {"name": "digits", "limit": 400, "transform": transform}, "runtime": {"executor": executor}}
    return quick_run.settings(changes, **{"training": {"rounds": 2, "epochs": 3}, **sections})


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "change.py"
    path.write_text(OWN)
    return path


def test_a_crop_moves_images_and_a_flip_mirrors_them():
    images = torch.arange(1, 1 + 200 * 3 * 16 * 16).view(200, 3, 16, 16)
    padded = np.pad(images.numpy(), [(0, 0), (0, 0), (2, 2), (2, 2)])
    moves = {(y, x): padded[:, :, y : y + 16, x : x + 16] for y in range(5) for x in range(5)}
    cropped = random_crop(images, torch.tensor(7)).numpy()
    used = {place for i in range(200) for place, moved in moves.items() if (moved[i] == cropped[i]).all()}
    assert all(any((moved[i] == cropped[i]).all() for moved in moves.values()) for i in range(200)) and len(used) == 25
    flipped = horizontal_flip(images, torch.tensor(7))
    mirrored = [bool((image == before.flip(-1)).all()) for image, before in zip(flipped, images, strict=True)]
    assert all((flipped[i] == images[i]).all() for i in range(200) if not mirrored[i]) and 70 < sum(mirrored) < 130


def test_loop_and_lanes_see_the_same_samples():
    pool = Pool(torch.randint(0, 256, (12, 1, 8, 8), dtype=torch.uint8), torch.arange(12) % 3)
    task = Task(MODELS["mlp"]().bind((1, 8, 8), 3), TrainingConfig(), 2, 0, (0.5,), (0.5,))
    transform, draws = Transform((random_crop, horizontal_flip)), torch.tensor([5, -9, 2**62])
    sizes = [4, 4, 3]
    alone = [batch.x for batch in ClientBatches(task, pool, torch.arange(11), sizes, None, 0.0, transform, draws)]
    index = torch.arange(12).view(3, 4)
    weight = torch.ones(3, 4)
    weight[2, 3] = 0

    def lane(images, draws):
        samples = images, pool.labels[index]
        batches = LaneBatches(task, lambda: samples, weight, 3, 2, None, 0.0, transform, draws)
        return torch.stack([batch.x for batch in batches])

    lanes = torch.func.vmap(lane)(pool.images[index].unsqueeze(0), draws.unsqueeze(0))[0]
    assert all(torch.equal(lanes[step, :size], alone[step]) for step, size in enumerate(sizes))
    assert not torch.equal(alone[0], task.prepare(pool.images[:4]))


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_the_bits_are_the_same_on_any_number_of_ranks_and_resumed(executor, tmp_path):
    digest = quick_run.run(settings(executor), tmp_path / "one")
    assert digest != quick_run.run(settings(executor, []), tmp_path / "plain")
    assert quick_run.run(settings(executor), tmp_path / "three", ranks=3) == digest
    quick_run.run(settings(executor, training={"rounds": 1, "epochs": 3}), tmp_path / "short")
    assert quick_run.resume(tmp_path / "short", ("training.rounds=2",), ranks=2) == digest
    with without_replay():
        assert quick_run.run(settings(executor), tmp_path / "unreplayed") == digest
    assert yaml.safe_load(config_file.path(tmp_path / "one").read_text())["data"]["transform"] == BOTH


def test_a_test_sees_no_transform(tmp_path):
    still = {"rounds": 1, "lr": 1e-30}
    for name, transform in (("changed", BOTH), ("plain", [])):
        quick_run.run(settings("loop", transform, training=still), tmp_path / name)
    lines = [(tmp_path / name / "metrics.csv").read_text().splitlines()[1].split(",") for name in ("changed", "plain")]
    header = (tmp_path / "plain" / "metrics.csv").read_text().splitlines()[0].split(",")
    tests = [dict(zip(header, line, strict=True)) for line in lines]
    assert tests[0]["test_loss"] == tests[1]["test_loss"] and tests[0]["train_loss"] != tests[1]["train_loss"]


def test_one_of_a_file_is_run_recorded_and_hashed(own, tmp_path, capfd):
    quick_run.run(settings("lanes", [f"{own}:darker"]), tmp_path / "run")
    written = yaml.safe_load(config_file.path(tmp_path / "run").read_text())
    assert written["data"]["transform"] == [f"{own}:darker"] and "transform/0" in str(written["recorded"]["code"])
    assert main(["list", f"{own}:darker"]) == 0
    assert "Darker by up to a half." in capfd.readouterr().out
    own.write_text(OWN.replace("/ 2", "/ 3"))
    with pytest.raises(CheckpointError, match=r"the code of transform/0 has changed .* --changed-code"):
        quick_run.resume(tmp_path / "run", ("training.rounds=3",))
    (tmp_path / "moved").mkdir()
    moved = own.rename(tmp_path / "moved" / "change.py")
    moved.write_text(OWN)
    reopen(tmp_path / "run", (f"data.transform=[{moved}:darker]",), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random_corp", "unknown transform 'random_corp'; did you mean 'random_crop'"),
        ("{own}:floats", "change.py:floats makes torch.float32 .* of samples torch.uint8 .*; expected the same shape"),
        ("{own}:own_draws", "change.py:own_draws .*uniform\\(key, shape\\)"),
        ("{own}:blanks_some", "change.py:blanks_some .*uniform\\(key, shape\\)"),
        ("{own}:blanks_rarely", "change.py:blanks_rarely .*uniform\\(key, shape\\)"),
        ("{own}:fails", "change.py:\\d+, in fails: IndexError"),
        ("{own}:seeded_by_key", "change.py:\\d+, in seeded_by_key: ValueError: expected non-negative"),
        ("{own}:uniform", "expected a function f\\(x, key\\)"),
        ("{own}:lost", "has no 'lost'; known: darker"),
    ],
)
def test_a_wrong_one_is_refused_before_the_start(name, said, own, tmp_path):
    with pytest.raises(ConfigError, match=said):
        quick_run.run(settings("loop", [name.format(own=own)]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["centred", "mixed"])
def test_one_that_mixes_the_samples_of_a_batch_runs_in_a_loop(name, own, tmp_path, caplog):
    with pytest.raises(ConfigError, match=rf"data.transform: {name} computes a sample from others of its batch, which"):
        quick_run.run(settings("lanes", [f"{own}:{name}"]), tmp_path / "run")
    alone = quick_run.run(settings("loop", [f"{own}:{name}"]), tmp_path / "loop")
    assert quick_run.run(settings("auto", [f"{own}:{name}"]), tmp_path / "auto") == alone
    assert f"runtime.executor: loop): data.transform: {name} computes" in caplog.text


@pytest.mark.parametrize("name", ["of_a_batch", "made_at_first"])
def test_one_that_fits_the_batches_of_the_run_or_draws_when_it_is_made_is_accepted(name, own, tmp_path):
    raw = quick_run.settings(settings("loop", [f"{own}:{name}"]), training={"batch_size": 10})
    plain = quick_run.settings(settings("loop", ["horizontal_flip"]), training={"batch_size": 10})
    del plain["data"]["transform"]
    assert quick_run.run(raw, tmp_path / "run") == quick_run.run(plain, tmp_path / "plain")


def test_one_of_a_run_that_is_there_is_not_tried_again(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick_run.run(settings("loop", [f"{own}:counted"]), tmp_path / "run")
    (tmp_path / "calls").unlink()
    reopen(tmp_path / "run", (), torch.device("cpu"))
    assert (tmp_path / "calls").read_text() == "x"


def test_one_that_fails_in_lanes_alone_runs_in_a_loop(own, tmp_path, caplog):
    said = "data.transform: looks_at_key works client by client and fails in lanes"
    with pytest.raises(ConfigError, match=rf"{said}, at .*change.py:\d+, .*item.*'loop'") as refusal:
        quick_run.run(settings("lanes", [f"{own}:looks_at_key"]), tmp_path / "run")
    assert "bug report" not in str(refusal.value)
    alone = quick_run.run(settings("loop", [f"{own}:looks_at_key"]), tmp_path / "loop")
    assert quick_run.run(settings("auto", [f"{own}:looks_at_key"]), tmp_path / "auto") == alone
    assert f"runtime.executor: loop): {said}" in caplog.text


def test_tables_have_nothing_to_crop():
    table = assemble("t", np.zeros((4, 5), np.float32), np.arange(4) % 2, np.zeros(4, bool), 2, None)
    with pytest.raises(ConfigError, match="takes images, CxHxW; the samples are 5"):
        load_transform(["random_crop"], torch.from_numpy(table.images), 4)


def test_keys_alone_decide(own):
    transform = load_transform([f"{own}:darker"], torch.zeros(2, 1, 8, 8, dtype=torch.uint8), 4)
    images = torch.full((3, 1, 8, 8), 200, dtype=torch.uint8)
    first, second = transform(images, torch.tensor(1)), transform(images, torch.tensor(2))
    assert not torch.equal(first, second) and torch.equal(first, transform(images, torch.tensor(1)))


def test_one_that_is_edited_during_a_run_stays_what_it_was(own):
    images, key = torch.full((3, 1, 8, 8), 200, dtype=torch.uint8), torch.tensor(1)
    transform = load_transform([f"{own}:darker"], images, 4)
    before = transform(images, key)
    own.write_text(OWN.replace("/ 2", "/ 3"))
    assert torch.equal(transform(images, key), before)

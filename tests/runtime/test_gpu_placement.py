"""Which GPU each rank gets, in the situations that launchers, Slurm, containers and users make."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pflmpi.errors import ConfigError
from pflmpi.machine import Gpu
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import GpuPlacement, place_ranks
from pflmpi.transports.peers import Peer

A100, H100, V100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "Tesla V100-PCIE-16GB"


def gpu(name, model=A100):
    """A GPU by a short name: "a0" is the first of host a, "a0/2" a slice of it."""
    return Gpu(f"{'MIG' if '/' in name else 'GPU'}-{name}", model, 40 << 30)


@dataclass(frozen=True)
class Situation:
    """What each rank sees, as "host: GPUs", and what each must get: the name of a GPU, or "cpu"."""

    ranks: list[str]
    expected: list[str]
    runtime: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)  # of a host, where it is not an A100
    serves_only: bool = False
    nccl: bool = False
    slots: int | None = None

    def peers(self) -> list[Peer]:
        all_peers = []
        for process, text in enumerate(self.ranks):
            host, _, names = text.partition(":")
            all_peers.append(
                Peer(host, process, (0, 1), tuple(gpu(name, self.models.get(host, A100)) for name in names.split()))
            )
        return all_peers


def node(host, gpus, ranks):
    """Ranks that all see all GPUs of their node."""
    return [f"{host}: " + " ".join(f"{host}{i}" for i in range(gpus))] * ranks


NODES = "abcdefgh"
SITUATIONS = {
    "one process, one GPU": Situation(["a: a0"], ["a0"], slots=1, nccl=True),
    "one process, four GPUs": Situation(node("a", 4, 1), ["a0"], nccl=True),
    "one node, a rank for each GPU": Situation(node("a", 4, 4), ["a0", "a1", "a2", "a3"], nccl=True, slots=4),
    "eight nodes of four": Situation(
        [text for host in NODES for text in node(host, 4, 4)],
        [f"{host}{i}" for host in NODES for i in range(4)],
        nccl=True,
        slots=32,
    ),
    "--gpus-per-task=1: each sees its own alone": Situation(
        ["a: a0", "a: a1", "a: a2", "a: a3"], ["a0", "a1", "a2", "a3"], nccl=True
    ),
    "--gpu-bind=map_gpu:3,2,1,0": Situation(["a: a3", "a: a2", "a: a1", "a: a0"], ["a3", "a2", "a1", "a0"], nccl=True),
    "--gpu-bind=single:2, two ranks on each GPU": Situation(
        ["a: a0", "a: a0", "a: a1", "a: a1"], ["a0", "a0", "a1", "a1"], slots=2
    ),
    "--gpu-bind=closest: two GPUs for each socket": Situation(
        ["a: a0 a1", "a: a0 a1", "a: a2 a3", "a: a2 a3"], ["a0", "a1", "a2", "a3"], nccl=True
    ),
    "a wrapper that sets CUDA_VISIBLE_DEVICES to the local rank": Situation(
        ["a: a0", "a: a1", "b: b0", "b: b1"], ["a0", "a1", "b0", "b1"], nccl=True
    ),
    "a wrapper that puts its own first": Situation(
        ["a: a0 a1 a2", "a: a1 a2 a0", "a: a2 a0 a1"], ["a0", "a1", "a2"], nccl=True
    ),
    "what a rank may use overlaps: the choosy one first": Situation(
        ["a: a0 a1", "a: a0", "a: a1 a2"], ["a1", "a0", "a2"], nccl=True
    ),
    "a later rank makes an earlier one move": Situation(
        ["a: a0 a1", "a: a0 a2", "a: a0 a2"], ["a1", "a0", "a2"], nccl=True
    ),
    "MIG: two slices of one GPU": Situation(["a: a0/1", "a: a0/2"], ["a0/1", "a0/2"], slots=2),
    "MIG: slices of two GPUs": Situation(["a: a0/1", "a: a1/1"], ["a0/1", "a1/1"]),
    "containers: other host names, the same GPU": Situation(
        ["x: a0", "y: a0"], ["cpu", "a0"], serves_only=True, nccl=True
    ),
    "containers: other host names, two GPUs": Situation(["x: a0 a1", "y: a0 a1"], ["a0", "a1"], nccl=True),
    "clients + 1 ranks: the server leaves the GPUs to them": Situation(
        node("a", 4, 5), ["cpu", "a0", "a1", "a2", "a3"], serves_only=True, nccl=True, slots=4
    ),
    "clients + 1 ranks, and the server computes too": Situation(
        node("a", 4, 5), ["a0", "a1", "a2", "a3", "a0"], {"server": "shared"}, slots=4
    ),
    "clients + 1 ranks on two nodes, the server beside the first four": Situation(
        [*node("a", 4, 5), *node("b", 4, 4)],
        ["cpu", *(f"{host}{i}" for host in "ab" for i in range(4))],
        serves_only=True,
        nccl=True,
    ),
    "the server on a node without a GPU": Situation(
        ["login:", *node("a", 2, 2)], ["cpu", "a0", "a1"], serves_only=True, nccl=True, slots=2
    ),
    "the server under --gpus-per-task sees one of its own": Situation(
        ["a: a0", "a: a1", "a: a2"], ["a0", "a1", "a2"], nccl=True
    ),
    "the server was given none": Situation(["a:", "a: a0", "a: a1"], ["cpu", "a0", "a1"], serves_only=True, nccl=True),
    "more ranks than GPUs": Situation(node("a", 2, 6), ["a0", "a1", "a0", "a1", "a0", "a1"], slots=2),
    "one more than twice as many": Situation(
        node("a", 2, 5), ["cpu", "a0", "a1", "a0", "a1"], serves_only=True, slots=2
    ),
    "two ranks, one GPU": Situation(node("a", 1, 2), ["cpu", "a0"], serves_only=True, nccl=True, slots=1),
    "uneven nodes": Situation(
        [*node("a", 4, 4), *node("b", 2, 2), *node("c", 1, 1)], ["a0", "a1", "a2", "a3", "b0", "b1", "c0"], nccl=True
    ),
    "fewer GPUs than ranks on the second node alone": Situation(
        [*node("a", 2, 2), *node("b", 1, 2)], ["a0", "a1", "b0", "b0"], slots=3
    ),
    "--gpus 1 on a shared node": Situation(
        node("a", 4, 2), ["cpu", "a0"], {"gpus": 1}, serves_only=True, nccl=True, slots=1
    ),
    "--gpus 2 of four": Situation(node("a", 4, 2), ["a0", "a1"], {"gpus": 2}, nccl=True),
    "no GPU anywhere": Situation(["a:", "a:", "b:"], ["cpu"] * 3, slots=4),
    "GPUs that are not to be used": Situation(node("a", 2, 2), ["cpu", "cpu"], {"device": "cpu"}, slots=2),
    "two models, allowed": Situation(
        [*node("a", 1, 1), *node("b", 1, 1)], ["a0", "b0"], {"mixed_gpus": "allow"}, {"b": H100}, nccl=True
    ),
    "two models, of which one computes nothing": Situation(
        [*node("a", 1, 1), *node("b", 1, 2)], ["a0", "b0", "b0"], {"mixed_gpus": "allow"}, {"a": V100}
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_rank_gets_its_gpu(name):
    situation = SITUATIONS[name]
    placed = place_ranks(situation.peers(), RuntimeConfig(**situation.runtime))
    assert [one.uuid[4:] if one else "cpu" for one in placed.gpu] == situation.expected
    assert placed.serves_only == situation.serves_only
    computing = tuple(rank for rank, name in enumerate(situation.expected) if name != "cpu")
    assert placed.gpu_ranks == (computing if situation.nccl else ())
    assert situation.slots in (None, placed.slots)
    assert placed.kind == ("cuda" if set(situation.expected) != {"cpu"} else "cpu")


FEW = [  # ranks that compute on GPUs, of which each may take any that it sees
    name
    for name, one in SITUATIONS.items()
    if 0 < len(one.expected) - one.expected.count("cpu") <= 6 and "gpus" not in one.runtime
]


@pytest.mark.parametrize("name", FEW)
def test_ranks_are_spread_as_evenly_as_they_can_be(name):
    """By brute force over all choices: nobody finds one whose fullest GPU has fewer ranks."""
    situation = SITUATIONS[name]
    placed = place_ranks(situation.peers(), RuntimeConfig(**situation.runtime))
    computing = [rank for rank, one in enumerate(placed.gpu) if one]
    seen = [[one.uuid for one in placed.peers[rank].gpus] for rank in computing]
    choices: list[list[str]] = [[]]
    for names in seen:
        choices = [[*before, one] for before in choices for one in names]
    assert max(map(placed.sharing, computing)) == min(max(map(choice.count, choice)) for choice in choices)


REFUSED = [
    ([*node("a", 2, 2), "b:"], {}, {}, r"rank 2 \(host b, process 2\) have no GPU, and others have one"),
    ([*node("a", 1, 1), *node("b", 1, 1)], {}, {"b": H100}, f"{A100}, {H100}.*mixed_gpus = 'allow'"),
    (["a:", "a:"], {"device": "cuda"}, {}, "no rank sees a CUDA device"),
    (node("a", 2, 2), {"gpus": 3}, {}, "runtime.gpus = 3, but a has 2"),
    (["a:"], {"gpus": 1}, {}, "runtime.gpus = 1 with .* no rank sees a GPU"),
]


@pytest.mark.parametrize(("ranks", "runtime", "models", "words"), REFUSED)
def test_what_cannot_be_placed_is_refused(ranks, runtime, models, words):
    with pytest.raises(ConfigError, match=words):
        place_ranks(Situation(ranks, [], models=models).peers(), RuntimeConfig(**runtime))


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_gpu_that_was_requested_and_is_not_there_is_refused_unless_the_run_is_for_cpus(device):
    peers = [Peer("a", 0), replace(Peer("b", 1), requested="SLURM_STEP_GPUS = '0'"), Peer("b", 2)]
    if device == "cpu":
        assert place_ranks(peers, RuntimeConfig(device="cpu")).kind == "cpu"
        return
    words = r"a GPU was requested \(SLURM_STEP_GPUS = '0' on rank 1 \(host b, process 1\); .*runtime\.device = 'cpu'"
    with pytest.raises(ConfigError, match=words if device == "auto" else "no rank sees a CUDA device"):
        place_ranks(peers, RuntimeConfig(device=device))


def test_a_server_that_sees_none_of_the_requested_gpus_only_serves():
    peers = Situation(["a:", "a: a0", "a: a1"], []).peers()
    assert place_ranks([replace(peers[0], requested="x"), *peers[1:]], RuntimeConfig()).serves_only


def test_a_server_with_another_model_that_computes_nothing_is_no_mix():
    peers = Situation([*node("a", 1, 2), *node("b", 1, 1)], [], models={"b": A100}).peers()
    changed_peers = [Peer(peers[0].host, 0, (0,), ()), *peers[1:]]
    assert place_ranks(changed_peers, RuntimeConfig()).models == (A100,)


def test_a_shared_gpu_is_remarked_on_once():
    crowded = place_ranks(Situation(node("a", 2, 6), []).peers(), RuntimeConfig())
    assert re.match(r"up to 3 ranks share a GPU.*MPS", crowded.remark())
    assert place_ranks(Situation(node("a", 2, 2), []).peers(), RuntimeConfig()).remark() == ""


ONE_EACH = {
    "--gpus-per-task=1: each sees its own alone",
    "--gpu-bind=map_gpu:3,2,1,0",
    "a wrapper that sets CUDA_VISIBLE_DEVICES to the local rank",
    "the server under --gpus-per-task sees one of its own",
    "the server was given none",
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_ranks_of_a_node_that_see_one_gpu_each_are_remarked_on(name):
    """Shut in with one GPU, NCCL and MPI cannot copy from it to another one."""
    situation = SITUATIONS[name]
    remark = place_ranks(situation.peers(), RuntimeConfig(**situation.runtime)).remark()
    assert ("--gpus-per-node=N with --gpu-bind=none" in remark) == (name in ONE_EACH), remark


def test_a_thousand_ranks_are_placed_quickly_enough_to_count():
    hosts = [f"n{i:03}" for i in range(250)]
    peers = Situation([text for host in hosts for text in node(host, 4, 4)], []).peers()
    placed: GpuPlacement = place_ranks(peers, RuntimeConfig())
    assert len(placed.gpu_ranks) == 1000 and placed.slots == 1000


def test_slots_count_the_cores_of_a_node_that_its_ranks_see_together():
    """`srun --cpus-per-task=2` shows each rank two cores of its own."""
    peers = [Peer("a", 1, (0, 1)), Peer("a", 2, (2, 3)), Peer("b", 3, (0, 1)), Peer("b", 4, (0, 1))]
    assert place_ranks(peers, RuntimeConfig()).slots == 6
    assert place_ranks(peers, RuntimeConfig(threads=2)).slots == 3


def test_what_a_rank_sees_survives_its_way_to_the_others():
    peer = Peer("node-17.cluster:8080", 4711, tuple(range(128)), (gpu("a0"), gpu("a0/1", H100)), requested="x = '0'")
    assert Peer.from_json(peer.to_json()) == peer

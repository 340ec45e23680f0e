"""Which GPU a rank computes on, and what follows from how ranks are spread over nodes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pflmpi.errors import ConfigError
from pflmpi.runtime import devices
from pflmpi.runtime.config import RuntimeConfig
from pflmpi.runtime.devices import for_peers, gpu_of
from pflmpi.transports.detect import Launch, detect
from pflmpi.transports.peers import Peer, all_slots, names
from pflmpi.transports.slurm import meeting_point
from project import ROOT

STEP = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]",
}


def node(ranks: int, first: int = 0, size: int | None = None) -> list[Launch]:
    """The ranks of one node, in a block."""
    return [Launch("mpi", first + i, size or ranks, i, ranks) for i in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (node(4), 4, [0, 1, 2, 3]),
        (node(5), 4, [None, 0, 1, 2, 3]),  # one too many: the server does without
        (node(6), 2, [0, 1, 0, 1, 0, 1]),
        (node(3), 0, [None] * 3),
        (node(1), 1, [0]),
        (node(2), 1, [None, 0]),
        (node(5, first=5, size=10), 4, [0, 1, 2, 3, 0]),  # of the second node, which has no server
    ],
)
def test_the_gpu_follows_from_the_local_rank(ranks: list[Launch], gpus: int, expected: list[int | None]) -> None:
    assert [gpu_of(rank, gpus, server_apart=True) for rank in ranks] == expected


def test_the_ranks_on_a_gpu_have_its_share_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: taken.append(limit))
    for rank in range(5):
        launch = Launch("mpi", rank, 5, rank, 5)
        device = torch.device("cuda", rank % 2)
        devices.limit_memory(device, RuntimeConfig(gpu_memory=0.5), launch)
        devices.limit_memory(device, RuntimeConfig(), launch)  # all of it: nothing to say
        devices.limit_memory(torch.device("cpu"), RuntimeConfig(gpu_memory=0.5), launch)
    assert [share for share, _ in taken] == pytest.approx([0.5 / 3, 0.25, 0.5 / 3, 0.25, 0.5 / 3])
    assert [device.index for _, device in taken] == [0, 1, 0, 1, 0]


def test_a_server_that_computes_too_keeps_its_gpu() -> None:
    assert [gpu_of(rank, 4, server_apart=False) for rank in node(5)] == [0, 1, 2, 3, 0]


def test_a_rank_that_slurm_shows_its_own_gpu_takes_the_first_it_sees() -> None:
    assert [gpu_of(replace(rank, bound=True), 1, server_apart=True) for rank in node(4)] == [0] * 4


@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ({}, False),
        ({"SLURMD_TRES_BIND": "gpu:per_task:1"}, True),  # --gpus-per-task
        ({"SLURMD_TRES_BIND": "gpu:single:1"}, True),  # --gpu-bind=single:1
        ({"SLURMD_TRES_BIND": "gpu:closest"}, False),
        ({"SLURMD_TRES_BIND": "gpu:per_task:1", "PMIX_RANK": "3"}, True),
        # Below the daemon of an mpirun, all ranks of the node see the GPUs of the daemon's task.
        (
            {
                "SLURMD_TRES_BIND": "gpu:per_task:1",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            False,
        ),
    ],
)
def test_whether_gpus_are_bound_to_ranks_is_what_slurm_says(variables: dict[str, str], bound: bool) -> None:
    assert detect({**STEP, **variables}).bound == bound


@pytest.mark.parametrize(
    ("variables", "fault_tolerant"),
    [
        ({}, False),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, False),  # with collectives that are wrong after a death
        ({"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_coll": "^han,adapt"}, True),
    ],
)
def test_ranks_can_go_on_only_with_all_settings(variables: dict[str, str], fault_tolerant: bool) -> None:
    assert detect({**STEP, **variables}).fault_tolerant == fault_tolerant


def test_a_restart_is_counted() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect(torchrun).restarts == 0
    assert detect({**torchrun, "TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


def test_a_server_without_a_gpu_computes_no_clients() -> None:
    there = [Peer("a", 1, "cpu", 4), *(Peer("a", 2 + i, "cuda", 4) for i in range(4))]
    assert for_peers(RuntimeConfig(), there).server == "dedicated"
    assert for_peers(RuntimeConfig(), there[1:]).server == "auto"
    assert for_peers(RuntimeConfig(), [Peer("a", 1)]).server == "auto"


def test_a_client_rank_without_a_gpu_beside_others_with_one_is_refused() -> None:
    there = [Peer("a", 1, "cuda"), Peer("a", 2, "cuda"), Peer("b", 3, "cpu")]
    with pytest.raises(ConfigError, match=r"rank 2 \(host b, process 3\) have no GPU, and others have one"):
        for_peers(RuntimeConfig(), there)


def test_slots_are_counted_once_per_node_also_on_uneven_nodes() -> None:
    there = [Peer("a", 1, slots=4), Peer("a", 2, slots=4), Peer("b", 3, slots=2), Peer("b", 4, slots=2)]
    assert all_slots(there) == 6


def test_a_peer_survives_its_way_through_a_buffer() -> None:
    peer = Peer("node-17.cluster:8080", 4711, "cuda", 8)
    assert Peer.unpacked(peer.packed()) == peer
    cut = Peer.unpacked(replace(peer, host="n" * 200).packed())
    assert (cut.process, cut.device, cut.slots) == (4711, "cuda", 8) and set(cut.host) == {"n"}


def test_a_peer_that_has_ended_is_seen_before_it_is_reaped() -> None:
    here = Peer.here("cpu", 1)
    assert not here.ended()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    peer = replace(here, process=child.pid)
    assert not peer.ended()
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    assert peer.ended(), "a zombie"
    child.communicate()
    assert peer.ended(), "gone"
    assert not replace(peer, host="elsewhere").ended()


def test_many_names_are_cut() -> None:
    assert names(range(20), []).endswith("rank 7 and 12 more")


def test_steps_of_one_job_meet_at_ports_of_their_own() -> None:
    assert meeting_point(STEP) == "node1:22345"
    assert meeting_point({**STEP, "SLURM_STEP_ID": "1"}) == "node1:22446"


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus-per-task=1"], {("0", 0, True), ("1", 0, True)}),
        (["--gres=gpu:2", "--gpu-bind=single:1"], {("0", 0, True), ("1", 0, True)}),
        (["--gres=gpu:2"], {("0,1", 0, False), ("0,1", 1, False)}),
    ],
)
def test_under_slurm_each_rank_has_the_gpu_that_slurm_gives_it(
    slurm: None, options: list[str], expected: set[tuple[str, int, bool]]
) -> None:
    code = """
import os
from pflmpi.runtime.devices import gpu_of
from pflmpi.transports.detect import detect
launch, seen = detect(os.environ), os.environ["CUDA_VISIBLE_DEVICES"]
print(repr((seen, gpu_of(launch, len(seen.split(",")), True), launch.bound)))
"""
    start = ["srun", "--nodes=1", "--ntasks=2", *options, sys.executable, "-c", code]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(map(eval, done.stdout.splitlines())) == expected

"""What the doctor says of facts that this machine does not have, and how it shows them."""

import json
from typing import Any

import pytest

from pflmpi.doctor import run
from pflmpi.doctor.checks import CHECKS, Problem, find_problems, run_check
from pflmpi.doctor.facts import PACKAGES, RankFacts, hold_probe_file, inspect_folder

GIB = 1 << 30
GPU = {"name": "A100", "gpus": 1, "uuid": "GPU-1", "memory": 80 * GIB, "memory_free": 70 * GIB, "gloo": True}
ROOM = {"memory": 64 * GIB, "memory_free": 60 * GIB, "shared_free": GIB}


def sound(rank=0, size=1, **changes):
    """The facts of a rank without problems, two ranks and four cores a host; changes are merged into sections."""
    facts: dict[str, Any] = {
        "rank": rank,
        "size": size,
        "launcher": "torchrun" if size > 1 else "alone",
        "host": f"node{1 + rank // 2}",
        "machine": {"cores": [0, 1, 2, 3], "omp": "1", **ROOM},
        "device": {"name": "CPU", "gloo": True},
        "folder": {"path": "/scratch/runs", "seen": True, "lock_seen": True, "free": 100 * GIB},
        "data": {"name": "mnist", "root": "/data", "files": 4, "digest": "d"},
        "versions": {"python": "3.12.1", "torch": "2.11", "mpi4py": "4.1"},
    }
    for name, change in changes.items():
        facts[name] = {**facts.get(name, {}), **change} if isinstance(change, dict) else change
    return facts


def told(everyone):
    """The lines that are shown for these facts, which travel as text."""
    facts = [RankFacts.model_validate_json(json.dumps(rank_facts)) for rank_facts in everyone]
    return [problem.line(facts) for problem in find_problems(facts)]


def world(*changes, size=4):
    """Ranks without problems but for these changes, the last of which holds for the rest."""
    return [sound(rank, size, **changes[min(rank, len(changes) - 1)]) for rank in range(size)]


def test_sound_ranks_have_no_problems():
    assert told([sound()]) == [] == told(world({}))
    by_mpi = {"launcher": "mpi", "mpi": {"used": True, "library": "Open MPI 5.0.11", "world": 4}}
    assert told(world(by_mpi)) == []
    assert told(world({"device": GPU}, {"device": {**GPU, "uuid": "GPU-2"}}, size=2)) == []
    # Bound to cores of their own, as srun does it, and no thread more.
    bound = [{"machine": {"cores": [rank], "omp": None}} for rank in range(4)]
    assert told(world(*bound)) == []


MPICH = {"used": True, "library": "MPICH 5.0.2", "world": 1}
CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no MPI": (
        [{"launcher": "mpi", "mpi": {"used": True, "error": "no library"}}],
        "ranks 0-3 on node1, node2: MPI cannot be used (no library); load the cluster's MPI module",
    ),
    "worlds of size 1": (
        [{"launcher": "mpi", "slurm": {"job": "7"}, "mpi": MPICH}],
        "ranks 0-3 on node1, node2: mpirun or srun has started 4 ranks, but MPI sees 1: 4 worlds of size 1; start "
        "with srun --mpi=pmi2",
    ),
    "no connection": (
        [{}, {"connection": "refused"}, {}],
        "rank 1 on node1: no connection to the other ranks (refused); see in the launcher's output",
    ),
    "versions": (
        [{}, {}, {"versions": {"torch": "2.10"}}, {}],
        "rank 2 on node2: torch is 2.10 here, and 2.11 on ranks 0-1, 3; use one environment on all hosts",
    ),
    "missing": ([{}, {"versions": {"mpi4py": ""}}, {}], "rank 1 on node1: mpi4py is missing here, and 4.1"),
    "broken package": ([{"broken": {"h5py": "no libhdf5"}}], "h5py cannot be imported (no libhdf5); install"),
    "broken torch": (
        [{}, {"broken": {"torch": "x"}, "device": {"name": "", "error": "torch cannot be imported (x)"}}, {}],
        "rank 1 on node1: torch cannot be imported (x); install the package again",
    ),
    "libraries": (
        [
            {"launcher": "mpi", "mpi": {"used": True, "library": library, "world": 4}}
            for library in ("Open MPI 5.0.11", "Open MPI 5.0.11", "Open MPI 4.1.4", "Open MPI 5.0.11")
        ],
        "rank 2 on node2: MPI is Open MPI 4.1.4 here, and Open MPI 5.0.11 on ranks 0-1, 3; use one",
    ),
    "configuration missing": (
        [{}, {"settings": {"error": "cannot read x.yaml"}}, {}],
        "rank 1 on node1: the configuration cannot be used here (cannot read x.yaml); keep it on",
    ),
    "configurations": (
        [{"settings": {"digest": "a"}}, {"settings": {"digest": "b"}}, {"settings": {"digest": "a"}}],
        "rank 1 on node1: the configuration is not that of ranks 0, 2-3; keep",
    ),
    "one GPU for two": (
        [{"device": GPU}, {"device": GPU}, {"device": {**GPU, "uuid": "GPU-2"}}, {"device": {**GPU, "uuid": "3"}}],
        "ranks 0-1 on node1: 2 ranks share one GPU (A100, GPU-1); give each its own",
    ),
    "one GPU for two needs MPS": (
        [{"device": GPU}, {"device": GPU}, {"device": {**GPU, "uuid": "GPU-2"}}, {"device": {**GPU, "uuid": "3"}}],
        "Where they must share it, start NVIDIA's MPS first (nvidia-cuda-mps-control -d)",
    ),
    "unlike devices": (
        [{}, {"device": {**GPU, "uuid": "2"}}, {"device": {**GPU, "uuid": "3"}}, {}],
        "rank 3 on node2: the device is CPU here, and A100 on ranks 1-2: results would depend on it; choose",
    ),
    "too many threads": (
        [{"machine": {"omp": "4"}}],
        "ranks 0-3 on node1, node2: 2 ranks with 4 threads each on 4 cores; export OMP_NUM_THREADS=2, or",
    ),
    "threads not set": (
        [{"machine": {"omp": None}}],
        "2 ranks with 4 threads each (OMP_NUM_THREADS is not set) on 4 cores; export OMP_NUM_THREADS=2",
    ),
    "runtime.threads": ([{"settings": {"threads": 4}}], "export OMP_NUM_THREADS=2 and set runtime.threads=2, or"),
    "more ranks than cores": (
        [{"machine": {"cores": [0]}}],
        "ranks 0-3 on node1, node2: 2 ranks on 1 core; start at most 1 on a host",
    ),
    "memory": (
        [{"machine": {"memory_free": 300 << 20}}],
        "300 MiB of memory are left for 2 ranks, and each needs 256 MiB; start fewer",
    ),
    "/dev/shm": ([{"machine": {"shared_free": 60 << 20}}], "/dev/shm has 60 MiB left for the messages of 2"),
    "another folder": (
        [{}, {"folder": {"seen": False, "lock_seen": None}}, {}],
        "rank 1 on node1: /scratch/runs is not rank 0's run folder: a file that rank 0 made is not there; choose",
    ),
    "locks of one host": (
        [{}, {}, {"folder": {"lock_seen": False}}],
        "ranks 2-3 on node2: a lock that rank 0 holds in /scratch/runs is not seen here: locks hold on one host",
    ),
    "disk": ([{"folder": {"free": 100 << 20}}], "100 MiB are left on the file system of"),
    "data missing on one rank": (
        [{}, {"data": {"error": "mnist was not found", "files": 0, "digest": ""}}, {}],
        "rank 1 on node1: data: mnist was not found; ranks 0, 2-3 can read it: make the folder visible",
    ),
    "unlike data": ([{}, {"data": {"digest": "e"}}, {}], "rank 1 on node1: data: the files have other sizes"),
    "launcher": ([{"launcher": "unclear", "connection": "two"}], "it is unclear how this was started (two); unset"),
    "Slurm's tasks": ([{"launcher": "alone", "slurm": {"tasks": "4"}}], "has given this job 4 tasks, but this is one"),
    "device": ([{}, {"device": {"name": "", "error": "the GPU is lost; see"}}, {}], "node1: the GPU is lost; see"),
    "run folder": (
        [{}, {"folder": {"error": "Read-only file system", "seen": None}}, {}],
        "the run folder /scratch/runs cannot be written (Read-only file system); choose a folder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_problem_is_named_once_with_its_remedy_and_ranks(case):
    changes, expected = CASES[case]
    lines = told(world(*changes))
    assert len(lines) == 1 and expected in lines[0], lines


def test_each_check_has_a_case_in_which_it_finds_something():
    zero_versions = {"versions": dict.fromkeys(("python", "pflmpi", *PACKAGES), "0")}
    cases = [*(changes for changes, _ in CASES.values()), [{}, zero_versions]]
    worlds = [[RankFacts.model_validate(rank_facts) for rank_facts in world(*changes)] for changes in cases]
    assert [check.find for check in CHECKS if not any(run_check(check, everyone) for everyone in worlds)] == []


def test_facts_of_another_version_are_read():
    newer = {**sound(1, 2), "unheard": {"of": 1}, "versions": {**sound()["versions"], "pflmpi": "9"}}
    older = {key: value for key, value in sound(0, 2).items() if key != "device"}
    assert [text.split(";")[0] for text in told([older, newer])] == [
        "rank 1 on node1: pflmpi is 9 here, and missing on rank 0"
    ]


def test_rank_0s_file_is_looked_for(tmp_path):
    with hold_probe_file(tmp_path) as name:
        assert inspect_folder(tmp_path, name).seen is True
        assert inspect_folder(tmp_path, "other").seen is False
    assert inspect_folder(tmp_path, "").seen is None and list(tmp_path.iterdir()) == []


# --- the table -----------------------------------------------------------------------------------------------------


def show(capsys, everyone):
    facts = [RankFacts.model_validate(rank_facts) for rank_facts in everyone]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # not as wide as the terminal in which the tests run
        run.show_facts(facts, [Problem("something is wrong", "put it right", (0, 1))])
    return capsys.readouterr().out.splitlines()


def test_up_to_16_ranks_have_a_row_each_and_values_name_their_ranks(capsys):
    shown = show(capsys, world({}, {"data": {"root": "/[other]"}}, {}))
    rows = shown[3:7]
    assert [row.split()[1] for row in rows] == ["0", "1", "2", "3"]
    assert [row.split()[3] for row in rows] == ["node1", "node1", "node2", "node2"]
    assert any("mnist: 4 files in /[other] " in row and row.split()[-2] == "1" for row in shown)
    assert any("mnist: 4 files in /data" in row and " 0, 2-3 " in row for row in shown)
    assert shown[-1] == "problem: ranks 0-1 on node1: something is wrong; put it right"


def test_many_ranks_share_the_rows_of_those_that_are_alike(capsys):
    everyone = world({}, size=40)
    everyone[7]["device"] = GPU
    everyone[3]["machine"] = {**everyone[3]["machine"], "memory_free": GIB}
    shown = "\n".join(show(capsys, everyone))
    assert "│ 0-6, 8-39 │ node1, node2 and 18 more │ CPU " in shown and "1 of 64 GiB" in shown  # the least
    assert "│ 7         │ node4 " in shown and "A100, 70 of 80 GiB" in shown


def test_the_way_of_messages_to_gpus_is_shown(capsys):
    way = "MPI, through the host: the library of every rank cannot move memory of a GPU"
    shown = " ".join(show(capsys, world({"messages": way}, size=2))).replace("│", " ")
    assert "messages MPI, through the host:" in " ".join(shown.split())

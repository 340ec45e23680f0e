"""How a run was started is read from recorded environments, and a transport that does not fit is refused."""

import subprocess
import sys

import pytest

from pflmpi.errors import ConfigError
from pflmpi.transports import open_transport
from pflmpi.transports.detect import ALONE, Launch, detect, new_run_id
from pflmpi.transports.slurm import find_rendezvous_address, parse_first_host
from project import ROOT

JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
DAEMON = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {**BY_HAND, "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
THERE = "node1:22345"


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        pytest.param({}, ALONE, id="no launcher"),
        pytest.param(TORCHRUN, Launch("torchrun", 1, 4), id="torchrun"),
        pytest.param({**STEP, **TORCHRUN}, Launch("torchrun", 1, 4), id="torchrun in an srun step"),
        pytest.param({**OPEN_MPI, **TORCHRUN}, Launch("torchrun", 1, 4), id="torchrun under mpirun"),
        pytest.param(BY_HAND, Launch("torchrun", 1, 2), id="torch's variables set by hand"),
        pytest.param({**BY_HAND, **OPEN_MPI}, Launch("mpi", 2, 4), id="mpirun with torch's variables left over"),
        pytest.param(OPEN_MPI, Launch("mpi", 2, 4), id="Open MPI"),
        pytest.param({**BATCH, **OPEN_MPI}, Launch("mpi", 2, 4), id="Open MPI in a batch script"),
        pytest.param({**DAEMON, **OPEN_MPI}, Launch("mpi", 2, 4), id="Open MPI below its daemon's srun step"),
        pytest.param(HYDRA, Launch("mpi", 1, 4), id="MPICH"),
        pytest.param({**DAEMON, **HYDRA}, Launch("mpi", 1, 4), id="MPICH below its daemon's srun step"),
        pytest.param({**STEP, "PMIX_RANK": "3"}, Launch("mpi", 3, 4, address=THERE), id="srun --mpi=pmix"),
        pytest.param({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}, Launch("mpi", 3, 4), id="srun --mpi=pmi2"),
        pytest.param(STEP, Launch("slurm", 3, 4, address=THERE), id="srun without MPI"),
        pytest.param(
            {**STEP, "SLURM_STEP_NUM_TASKS": ""}, Launch("slurm", 3, 4, address=THERE), id="an empty variable"
        ),
        pytest.param(BATCH, ALONE, id="a batch script"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967291"}, ALONE, id="a batch script that has a step id"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967290"}, ALONE, id="the shell of salloc"),
        pytest.param(JOB, ALONE, id="an allocation"),
        pytest.param(
            {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
            ALONE,
            id="srun with one task",
        ),
        pytest.param({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ALONE, id="the first of a step"),
        pytest.param(
            {**STEP, **BY_HAND, "SLURM_STEP_NUM_TASKS": "1"}, Launch("torchrun", 1, 2), id="ranks set by hand in a step"
        ),
    ],
)
def test_a_launch_is_recognised(environ, launch):
    assert detect(environ) == launch


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "two"}, "OMPI_COMM_WORLD_RANK = 'two'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "contradict each other: OMPI_COMM_WORLD_RANK = 4 of"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is set, but neither"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, "contradict each other: SLURM_PROCID = 3 of SLURM_STEP_NUM_TASKS = 1"),
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}, "SLURM_NTASKS is not set; expected"),
    ],
)
def test_an_impossible_environment_is_refused(environ, message):
    with pytest.raises(ConfigError) as raised:
        detect(environ)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("node[003-010,17],login", "node003"),
        ("node[7]", "node7"),
        ("rack[1-2]n[05,7]-ib", "rack1n05-ib"),
        ("gpu-a.cluster.org,gpu-b", "gpu-a.cluster.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert parse_first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "node[", "node[]", "a b"])
def test_a_node_list_that_cannot_be_read_is_refused(nodes):
    with pytest.raises(ConfigError, match="cannot be read; set MASTER_ADDR"):
        parse_first_host(nodes)


def test_where_ranks_meet_follows_from_the_job_and_can_be_set():
    assert find_rendezvous_address(STEP) == "node1:22345"
    assert find_rendezvous_address({**STEP, "SLURM_STEP_ID": "1"}) == "node1:28526", "steps may run concurrently"
    assert find_rendezvous_address({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}) == "10.0.0.1:4000"
    assert find_rendezvous_address({}) == ""


@pytest.mark.parametrize(
    ("name", "launch", "message"),
    [
        ("inprocess", Launch("mpi", 0, 3), "mpirun or srun has started 3 ranks; use auto"),
        ("inprocess", Launch("torchrun", 0, 2), "torchrun has started 2 ranks"),
        ("torch", ALONE, "nothing has started this, and RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"),
        ("torch", Launch("mpi", 0, 3), "mpirun or srun has started this, and RANK"),
        ("mpi", Launch("torchrun", 0, 3), "torchrun has started 3 ranks, which MPI cannot connect"),
    ],
)
def test_a_transport_that_does_not_fit_the_launch_is_refused(name, launch, message):
    with pytest.raises(ConfigError) as raised:
        open_transport(name, launch, timeout=1.0)
    assert message in str(raised.value)


def test_alone_means_in_process():
    for name in ("auto", "inprocess"):
        transport = open_transport(name, ALONE, timeout=1.0)
        assert (transport.name, transport.rank, transport.size) == ("inprocess", 0, 1)


def test_a_missing_mpi4py_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "pflmpi.transports.mpi", raising=False)
    with pytest.raises(ConfigError, match=r"needs mpi4py and an MPI library .*pip install 'pflmpi\[mpi\]'"):
        open_transport("mpi", Launch("mpi", 0, 3), timeout=1.0)


def python(code):
    """Run code in a process of its own, without the variables of a launcher."""
    setup = "from pflmpi.errors import *; from pflmpi.transports import open_transport, detect"
    return subprocess.run(
        [sys.executable, "-c", f"{setup}\n{code}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_mpi_that_sees_only_itself_names_sruns_flag():
    done = python("""
try:
    open_transport("mpi", detect.Launch("slurm", 0, 4), 5.0)
except ConfigError as error:
    print(error)""")
    assert "srun has started 4 ranks, but MPI sees 1; " in done.stdout, done.stderr
    assert "srun --mpi=pmix" in done.stdout


def test_no_torch_and_no_mpi_without_need():
    done = python("""
import sys
open_transport("auto", detect.ALONE, 1.0).close()
assert not {"torch", "mpi4py"} & sys.modules.keys()""")
    assert done.returncode == 0, done.stderr


def test_what_starts_a_process_again_is_known_with_its_restarts():
    assert detect({}).jobs == {}
    assert detect({"SLURM_JOB_ID": "77"}).jobs == {"Slurm job 77": 0}
    torchrun = {"TORCHELASTIC_RUN_ID": "a1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert detect({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1", **torchrun}).jobs == {
        "Slurm job 77": 1,
        "torchrun a1": 2,
    }
    assert detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": new_run_id()}).jobs == {}, "nobody starts it again"

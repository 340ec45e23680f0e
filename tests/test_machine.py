"""What this machine is: its memory as control groups leave it, its cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pflmpi import machine
from pflmpi.machine import cores, memory, num_cores


def test_the_folder_of_a_run_to_come_is_the_nearest_one_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "link"
    link.symlink_to("nothing")
    assert machine.nearest_existing(Path("a/b")) == machine.nearest_existing(link / "b") == tmp_path
    assert machine.nearest_existing(link / "b", os.path.lexists) == link


@pytest.mark.parametrize(
    ("group", "files", "total", "free"),
    [
        ("0::/job/step", {}, 1000, 600),
        ("0::/job/step", {"job/memory.max": "500", "job/memory.current": "450"}, 500, 150),
        ("0::/job/step", {"job/memory.max": "max", "job/memory.current": "450"}, 1000, 600),
        (
            "4:cpu,memory:/job",
            {"memory/job/memory.limit_in_bytes": "300", "memory/job/memory.usage_in_bytes": "310"},
            300,
            90,
        ),
    ],
)
def test_the_memory_of_a_job_is_what_its_group_leaves(group, files, total, free, tmp_path):
    for name, text in {
        "proc/meminfo": "MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  600 kB\n",
        "proc/self/cgroup": f"1:name=systemd:/\n{group}\n",
        **{
            f"sys/fs/cgroup/{name}": str(1024 * int(text)) if text.isdecimal() else text for name, text in files.items()
        },
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {1024 * 100}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {1024 * 100}\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory(tmp_path) == (1024 * total, 1024 * free)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES = '0,1'"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "ROCR_VISIBLE_DEVICES = '0'"),
        ({"ZE_AFFINITY_MASK": "0.1"}, "ZE_AFFINITY_MASK = '0.1'"),
        ({"SLURM_STEP_GPUS": "3", "SLURM_GPUS_ON_NODE": "4"}, "SLURM_STEP_GPUS = '3'"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "SLURM_GPUS_ON_NODE = '4'"),
        ({"SLURM_GPUS_ON_NODE": "0"}, ""),
        # a step of a job with --exclusive on a node with GPUs
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_ID": "0"}, ""),
        # what hides the GPUs, by a user or by Slurm for a step without any
        ({"CUDA_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "4"}, ""),
    ],
)
def test_the_environment_says_whether_a_gpu_was_requested(environ, expected):
    assert machine.requested_gpus(environ) == expected


def test_without_proc_all_memory_counts_as_free(tmp_path):
    total, free = memory(tmp_path)
    assert total == free == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_a_bound_process_has_the_cores_it_is_bound_to():
    last = cores()[-1]
    code = f"import os; os.sched_setaffinity(0, [{last}]); from pflmpi.machine import cores; print(*cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(last)]


@pytest.mark.parametrize(
    ("per_task", "on_node", "expected"),
    [("", "", 6), ("2", "", 2), ("", "3", 3), ("2", "4", 2), ("4", "2", 2), ("16", "16", 6), ("0", "many", 6)],
)
def test_a_task_has_the_cores_of_its_allocation_also_where_it_is_not_bound(per_task, on_node, expected, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: range(6))
    assert num_cores({"SLURM_CPUS_PER_TASK": per_task, "SLURM_CPUS_ON_NODE": on_node}) == expected

"""`torchrun ... nccl_on_one_gpu.py WORDS`: `pflmpi WORDS` on ranks that share a GPU, and take it for one of their own.

NCCL refuses two ranks on one GPU, unless it takes them for ranks of two hosts.
"""

import os
import sys
from unittest import mock

os.environ["NCCL_HOSTID"] = f"host-of-{os.environ['RANK']}"

from pflmpi import cli, machine
from pflmpi.commands import rank


def gpus(visible):
    """The GPUs, by names that each rank alone has; rank 0 sees none where it is to serve from the CPU."""
    if os.environ["RANK"] == "0" and "SERVER_WITHOUT_GPU" in os.environ:
        return ()
    return tuple(gpu._replace(uuid=f"{gpu.uuid}-{os.environ['RANK']}") for gpu in machine.gpus(visible))


if __name__ == "__main__":
    with mock.patch.object(rank, "gpus", gpus):
        sys.exit(cli.main(sys.argv[1:]))

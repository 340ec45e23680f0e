"""Nothing but the steps: one process for each core, each with its share of the participants, the mean at the end."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import work
from torch import distributed
from torch.nn import functional as F


def main() -> None:
    """Train, and say when each round ended."""
    torch.set_num_threads(1)
    of = work.WORKS[sys.argv[1]]
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    images, labels = work.read(Path(sys.argv[2]))
    torch.manual_seed(0)
    network = work.network(of).train()
    if of.model in ("cnn", "resnet18"):  # with the 7x7 stem it is slower
        network = network.to(memory_format=torch.channels_last)
        images = [x.contiguous(memory_format=torch.channels_last) for x in images]
    leaves, buffers = list(network.parameters()), [one for one in network.buffers() if one.is_floating_point()]
    everything = [*leaves, *buffers]
    ends: list[float] = []
    for _ in range(of.rounds):
        chosen = torch.randperm(of.clients)[: of.cohort].tolist()
        start = [one.detach().clone() for one in everything]
        total = [torch.zeros_like(one) for one in start]
        for client in chosen[rank::size]:
            with torch.no_grad():
                torch._foreach_copy_(everything, start)
            for x, y in work.epoch(of, images[client], labels[client]):
                slopes = torch.autograd.grad(F.cross_entropy(network(x), y), leaves)
                with torch.no_grad():
                    torch._foreach_sub_(leaves, slopes, alpha=work.LR)
            with torch.no_grad():
                torch._foreach_add_(total, everything)
        flat = torch.cat([one.flatten() for one in total]).div_(of.cohort)
        distributed.all_reduce(flat)
        with torch.no_grad():
            parts = flat.split([one.numel() for one in everything])
            torch._foreach_copy_(everything, [part.view_as(one) for part, one in zip(parts, everything, strict=True)])
        ends.append(time.time())
    if rank == 0:
        print(json.dumps({"ends": ends}), flush=True)
    sys.stdout.flush()
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Peer of `lockstep bench launch`: one gloo all-reduce, as a script that torchrun starts."""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
if dist.get_rank() == 0:
    print(f"sum {value.item():.0f}", flush=True)
dist.destroy_process_group()

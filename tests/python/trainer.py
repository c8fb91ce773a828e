"""A user's script: DistributedDataParallel on CPU, with another backend name."""

import torch
import torch.distributed as dist

import lockstep_torch  # noqa: F401  pylint: disable=unused-import


def main():
    dist.init_process_group("lockstep")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [torch.empty(8, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(w, weights[0]) for w in weights)
    print(f"rank {dist.get_rank()} trained", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What Python's samplers give, for sampler_test.cpp: one process for all configurations.

    python3 sampler_oracle.py requests.jsonl answers.bin

An answer is a count and that many indices, all int64.
"""
import json
import sys

import torch
from torch.utils.data import WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler


def distributed(request):
    sampler = DistributedSampler(
        range(request["n"]), num_replicas=request["replicas"], rank=request["rank"],
        shuffle=request["shuffle"], seed=request["seed"], drop_last=request["drop_last"])
    sampler.set_epoch(request["epoch"])
    indices = list(sampler)
    assert len(sampler) == len(indices)
    return indices


def weights_of(n):
    """The same in sampler_test.cpp: exact in binary, zeros among them."""
    return [(i * 7 % 11) / 4 for i in range(n)]


def weighted(request):
    generator = torch.Generator().manual_seed(request["seed"] + request["epoch"])
    return list(WeightedRandomSampler(weights_of(request["n"]), request["num_samples"],
                                      request["replacement"], generator))


def lengths_of(n):
    return [i * 37 % 101 for i in range(n)]


def grouped(request):
    """Hugging Face's group_by_length, from its description: groups of up to 50 batches, each from
    long to short, and the longest of all in front."""
    lengths, batch = lengths_of(request["n"]), request["batch"]
    generator = torch.Generator().manual_seed(request["seed"] + request["epoch"])
    order = torch.randperm(len(lengths), generator=generator).tolist()
    size = batch * (min(len(lengths) // (4 * batch), 50) or 1)
    groups = [sorted(order[i:i + size], key=lengths.__getitem__, reverse=True)
              for i in range(0, len(order), size)]
    tops = [lengths[g[0]] for g in groups]
    top = tops.index(max(tops))
    groups[0][0], groups[top][0] = groups[top][0], groups[0][0]
    return [i for g in groups for i in g]


KINDS = {"distributed": distributed, "weighted": weighted, "grouped": grouped}


def main():
    with open(sys.argv[1]) as requests, open(sys.argv[2], "wb") as answers:
        for line in requests:
            request = json.loads(line)
            indices = KINDS[request["kind"]](request)
            answers.write(torch.tensor([len(indices)] + indices, dtype=torch.int64).numpy()
                          .tobytes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

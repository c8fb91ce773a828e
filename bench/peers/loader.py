"""The peer of `lockstep bench loader`: PyTorch's DataLoader with the same sleeps.

    python3 loader.py BATCHES BATCH_SIZE WORKERS LOAD_MS STEP_MS
"""
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

BATCHES, BATCH_SIZE, WORKERS = map(int, sys.argv[1:4])
LOAD_S, STEP_S = (float(ms) / 1000 for ms in sys.argv[4:6])


class Sleeping(Dataset):
    def __len__(self):
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index):
        if index % BATCH_SIZE == 0:
            time.sleep(LOAD_S)
        return torch.full((16,), float(index)), index


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Sleeping(), BATCH_SIZE, num_workers=WORKERS, drop_last=True)
    waits, start = [], None
    batches = iter(loader)
    while True:
        before = time.perf_counter()
        if next(batches, None) is None:
            break
        now = time.perf_counter()
        if start is None:
            start = now  # the first batch waits for the workers' start
        else:
            waits.append(now - before)
        time.sleep(STEP_S)
    seconds = time.perf_counter() - start
    waits.sort()
    p99 = waits[round(0.99 * (len(waits) - 1))] * 1000
    print(f"PyTorch:  the step waits {100 * sum(waits) / seconds:.2f} % of the time, "
          f"p99 {p99:.3f} ms", flush=True)


if __name__ == "__main__":
    main()

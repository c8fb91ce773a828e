"""A user's script for each framework, as for torchrun: trains on CPU and prints its weights.

    lockstep run --nproc-per-node=2 [--replace-gloo] frameworks.py plain|accelerate|lightning
"""

import hashlib
import sys

import torch
import torch.distributed as dist

STEPS = 6


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))


def make_data():
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(128, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1).gt(0).long())


def plain(backend):
    dist.init_process_group(backend)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = torch.utils.data.DistributedSampler(make_data())
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8, sampler=sampler)
    for _, (x, y) in zip(range(STEPS), loader):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module


def accelerate():
    from accelerate import Accelerator  # pylint: disable=import-outside-toplevel

    accelerator = Accelerator(cpu=True)
    model = make_model()
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    for _, (x, y) in zip(range(STEPS), loader):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model)


def lightning():
    import pytorch_lightning as pl  # pylint: disable=import-outside-toplevel

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _):
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS,
                         gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(make_data(), batch_size=8))
    return module


def main():
    backend = sys.argv[2] if len(sys.argv) > 2 else "gloo"
    torch.set_num_threads(1)
    model = plain(backend) if sys.argv[1] == "plain" else globals()[sys.argv[1]]()
    assert dist.get_backend() == backend, dist.get_backend()
    assert dist.get_world_size() == 2
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ours = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__
    print(f"weights {hashlib.sha256(weights).hexdigest()} by {ours}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

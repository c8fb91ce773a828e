"""Hugging Face's Trainer on a small GPT-2: the other side of hf_trainer_test.py.

    make(folder)       initial weights (init/model.safetensors), tokens (data/*.bin)
    train(folder)      as a rank of a world: writes losses.json, one mean loss per step

Both Trainers must compute the same, so this one is configured for what ours does by default:
PyTorch's DistributedSampler (accelerate would deal whole batches instead), the fused AdamW, targets
that are the window shifted by one token. Losses are taken raw from training_step, because the
log rounds them.
"""

import json

import numpy
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SEED = 1234
MODEL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 96, "n_positions": 48}
SEQ_LEN = 48
WINDOWS = 320
# The arguments of both sides, under the names that both know.
ARGUMENTS = {
    "seed": 77,
    "max_steps": 50,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 7,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "dataloader_drop_last": True,
}
LLMC_MAGIC, LLMC_VERSION = 20240520, 1


def make_tokens():
    """A language with something to learn: each token mostly follows from the one before it."""
    random = numpy.random.default_rng(SEED)
    count = WINDOWS * SEQ_LEN + 1
    tokens = numpy.zeros(count, dtype=numpy.uint16)
    noise = random.random(count)
    other = random.integers(0, MODEL["vocab_size"], count)
    for i in range(1, count):
        rule = (5 * int(tokens[i - 1]) + 1) % MODEL["vocab_size"]
        tokens[i] = rule if noise[i] < .8 else other[i]
    return tokens


def make(folder):
    transformers.set_seed(SEED)
    (folder / "data").mkdir(parents=True)
    tokens = make_tokens()
    header = numpy.zeros(256, dtype="<i4")
    header[:3] = LLMC_MAGIC, LLMC_VERSION, len(tokens)
    with open(folder / "data" / "train_000000.bin", "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
    # The tanh form of GELU in one kernel, as in torch::gelu.
    config = GPT2Config(**MODEL, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.,
                        activation_function="gelu_pytorch_tanh", bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide a swapped name
            parameter.add_(torch.randn_like(parameter) * .02)
    model.save_pretrained(folder / "init", safe_serialization=True)


class Windows(Dataset):
    def __init__(self, folder):
        raw = (folder / "data" / "train_000000.bin").read_bytes()
        self.tokens = torch.from_numpy(numpy.frombuffer(raw[1024:], "<u2").astype(numpy.int64))

    def __len__(self):
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index):
        begin = index * SEQ_LEN
        return {"input_ids": self.tokens[begin:begin + SEQ_LEN],
                "labels": self.tokens[begin + 1:begin + 1 + SEQ_LEN]}


class Loader(DataLoader):
    """The Trainer calls set_epoch of what it was given; the sampler is what needs it."""

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


class Recorder(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.raw = []  # of every backward pass of this rank

    def get_train_dataloader(self):
        sampler = DistributedSampler(self.train_dataset, shuffle=True, seed=self.args.seed,
                                     drop_last=True)
        return Loader(self.train_dataset, batch_size=self.args.per_device_train_batch_size,
                      sampler=sampler, drop_last=True)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.raw.append(loss.double().item())
        return loss


def targets_as_given(outputs, labels, num_items_in_batch=None):
    """Cross entropy without the model's own shift: the labels are already one token later."""
    logits = outputs["logits"].float().view(-1, MODEL["vocab_size"])
    loss = torch.nn.functional.cross_entropy(logits, labels.view(-1), reduction="sum")
    return loss / num_items_in_batch


def train(folder):
    torch.set_num_threads(1)
    model = GPT2LMHeadModel.from_pretrained(folder / "init", dtype=torch.float32,
                                            attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), use_cpu=True, ddp_backend="gloo", logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True, **ARGUMENTS)
    trainer = Recorder(model=model, args=arguments, train_dataset=Windows(folder),
                       compute_loss_func=targets_as_given)
    trainer.train()
    # Each backward pass has its share of the window's mean; together they are that mean.
    window = ARGUMENTS["gradient_accumulation_steps"]
    assert len(trainer.raw) == window * ARGUMENTS["max_steps"], len(trainer.raw)
    mine = torch.tensor(trainer.raw, dtype=torch.float64).view(-1, window).sum(1)
    dist.all_reduce(mine)
    mine /= dist.get_world_size()
    if dist.get_rank() == 0:
        final = {name: p.detach().double().norm().item() for name, p in model.named_parameters()}
        (folder / "losses.json").write_text(json.dumps({"losses": mine.tolist(), "norms": final}))
    dist.barrier()

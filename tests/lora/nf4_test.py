"""Weights in 4 bits beside bitsandbytes' on the CPU.

The 4-bit numbers and the largest magnitudes of their blocks are bitsandbytes', byte for byte. Two
parts of its double quantisation depend on the processor: torch.linspace rounds the 256 numbers of
its dynamic map differently where it computes in vectors of another width (42 of them, by a unit in
the last place), and the mean of the magnitudes is a sum in an order that follows width and threads.
So that part is computed here from the definition with our numbers and our mean, also byte for byte,
and beside bitsandbytes' own within what another rounding of these changes: a step of the map, where
a magnitude lies between two of its numbers, and 4 units in the last place of the magnitude.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MISSING = [name for name in ("torch", "bitsandbytes", "safetensors")
           if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"SKIP 1: the interpreter has no {', '.join(MISSING)}; set LOCKSTEP_PYTHON")
    sys.exit(77)

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # each odd size would be compiled
import torch  # noqa: E402
from bitsandbytes import functional  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

PEER = pathlib.Path(os.environ["LOCKSTEP_BIN"], "tests", "lora_peer")
SIZES = [(1, 1), (1, 2), (64, 64), (3, 65), (257, 129), (32, 48), (1000, 500), (5, 13107)]


def matrices():
    generator = torch.Generator().manual_seed(11)
    made = {}
    for out, inside in SIZES:
        made[f"normal_{out}_{inside}"] = torch.randn(out, inside, generator=generator)
    uniform = torch.rand(96, 256, generator=generator) * 2 - 1
    made["uniform"] = uniform
    made["bfloat16"] = torch.randn(128, 160, generator=generator).bfloat16()
    made["float16"] = torch.randn(128, 160, generator=generator).half()
    made["zeros"] = torch.zeros(40, 64)
    made["some_zeros"] = torch.where(torch.arange(96)[:, None] % 3 == 0, 0, uniform)
    made["subnormal"] = uniform * 1e-39
    made["wide"] = uniform * 10.0 ** torch.arange(-20, 20, 40 / 96)[:, None]
    return made


def dynamic_map():
    """The definition of bitsandbytes' map, one number after the other."""
    tenth, one = torch.tensor(0.1), torch.tensor(1.0)
    positive = []
    for i in range(7):
        steps = 2 ** i
        step = (one - tenth) / steps
        edges = [tenth + step * k if k < (steps + 1) // 2 else one - step * (steps - k)
                 for k in range(steps + 1)]
        positive += [(a + b) / 2 * torch.tensor(10.0 ** (i - 6))
                     for a, b in zip(edges, edges[1:])]
    positive = torch.stack(positive)
    return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)])


def encode(matrices_by_name):
    with tempfile.TemporaryDirectory(prefix="lockstep-nf4-") as place:
        folder = pathlib.Path(place)
        save_file(matrices_by_name, folder / "in.safetensors")
        (folder / "job.json").write_text(json.dumps(
            {"matrices": str(folder / "in.safetensors"), "out": str(folder / "out.safetensors")}))
        subprocess.run([PEER, folder / "job.json"], check=True, timeout=300)
        return load_file(folder / "out.safetensors")


class Bitsandbytes(unittest.TestCase):
    def test_bytes_and_decoded_values(self):
        given = matrices()
        ours = encode(given)
        numbers = dynamic_map()
        torch.testing.assert_close(numbers, functional.create_dynamic_map(), rtol=2.5e-7, atol=0)
        middles = (numbers[:-1] + numbers[1:]) / 2
        for name, matrix in given.items():
            with self.subTest(name):
                blocks = -(-matrix.numel() // 64)
                groups = -(-blocks // 256)
                data = ours[f"{name}.bytes"].flatten()
                codes, data = data.split([groups * 256 * 32, data.numel() - groups * 256 * 32])
                quantized, scales, mean, _ = data.split(
                    [groups * 256, groups * 4, 4, data.numel() - groups * 260 - 4])
                scales, mean = scales.view(torch.float32), mean.view(torch.float32)

                theirs, state = functional.quantize_4bit(matrix, quant_type="nf4")
                self.assertTrue(codes[:theirs.numel()].equal(theirs.flatten()))
                largest = state.absmax
                torch.testing.assert_close(mean[0], largest.double().mean().float(), rtol=0, atol=0)
                rest = torch.nn.functional.pad(largest - mean, (0, groups * 256 - blocks))
                rest = rest.view(groups, 256)
                self.assertTrue(scales.equal(rest.abs().amax(1)))
                scaled = rest * (1 / scales.clamp(min=1e-38))[:, None]
                self.assertTrue(quantized[:blocks].int().equal(
                    torch.bucketize(scaled, middles, out_int32=True).flatten()[:blocks]))

                state.absmax = (numbers[quantized.int()].view(groups, 256) * scales[:, None] +
                                mean).flatten()[:blocks].contiguous()
                for kind in ("float32", "bfloat16", "float16"):
                    state.dtype = getattr(torch, kind)
                    # As one row: their library for CPUs takes the magnitudes of other blocks where
                    # the width is no multiple of 64.
                    state.shape = torch.Size([matrix.numel()])
                    decoded = functional.dequantize_4bit(theirs, state).flatten()
                    self.assertTrue(decoded.equal(ours[f"{name}.{kind}"].flatten()), kind)

                nested, state = functional.quantize_4bit(matrix, quant_type="nf4",
                                                         compress_statistics=True)
                state.dtype, state.shape = torch.float32, torch.Size([matrix.numel()])
                decoded = functional.dequantize_4bit(nested, state).flatten()
                apart = (decoded - ours[f"{name}.float32"].flatten()).abs().max().item()
                print(f"{name}: {apart:.1e} apart from bitsandbytes' own", flush=True)
                step = numbers.diff().max() * scales.max() + largest.max() * 2 ** -21 + 1e-38
                self.assertLessEqual(apart, step.item())


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""Linear layers in fp8 for the PyTorch peers: torch._scaled_mm with one dynamic scale for a tensor,
written as a user of torch.compile would; the compiler fuses the casts."""
import torch
import torch.nn as nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast(x, dtype):
    """The matrix in fp8, and what to multiply it by to get it back."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def product(a, b, scale_a, scale_b, fast=False):
    """a times the transpose of b; both lie along the dimension that is summed."""
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), scale_a=scale_a, scale_b=scale_b,
                            out_dtype=torch.bfloat16, use_fast_accum=fast)


class Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        (x8, sx), (w8, sw) = cast(x, E4M3), cast(weight, E4M3)
        ctx.save_for_backward(x8, sx, w8, sw)
        return product(x8, w8, sx, sw, fast=True)

    @staticmethod
    def backward(ctx, grad):
        x8, sx, w8, sw = ctx.saved_tensors
        g8, sg = cast(grad, E5M2)
        dx = product(g8, w8.t(), sg, sw)
        dweight = product(g8.t(), x8.t(), sg, sx) if ctx.needs_input_grad[1] else None
        return dx, dweight


class Fp8Linear(nn.Linear):
    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        y = Fp8Product.apply(rows, self.weight.to(torch.bfloat16))
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def convert(net):
    """All linear layers but the head and adapters, as ours."""
    for name, module in net.named_modules():
        fits = isinstance(module, nn.Linear) and not any(n % 16 for n in module.weight.shape)
        if fits and not any(part in name for part in ("lm_head", "lora_")):
            module.__class__ = Fp8Linear

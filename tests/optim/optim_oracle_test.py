"""Our schedules, loss scaling, clipping and optimizers beside the originals, number by number.

The originals are transformers.get_scheduler (skipped, and said so, where the package is missing),
torch.optim.lr_scheduler's StepLR, MultiStepLR and ExponentialLR, torch.amp.GradScaler("cpu"),
torch.nn.utils.clip_grad_*, torch.optim with fused=True, torch.optim.Muon, torch.optim.RMSprop, the
lines of Lion's paper and transformers' Adafactor. Everything that runs the same kernels in
the same order must have the same bits. A schedule's factor comes from a few double operations and a
cosine; compilers may fuse two of them, so 4 units in the last place.
"""

import json
import math
import os
import random
import struct
import subprocess
import sys
import unittest

import torch

torch.set_num_threads(1)
PEER = os.path.join(os.environ["LOCKSTEP_BIN"], "tests", "optim_peer")
INF = "inf"

try:
    import transformers
except ImportError as missing:
    transformers = None
    print(f"SKIP schedules beside Hugging Face's: {missing}", flush=True)


def ask(questions):
    text = "".join(json.dumps(q) + "\n" for q in questions)
    done = subprocess.run([PEER], input=text, capture_output=True, text=True, timeout=600)
    answers = done.stdout.splitlines()
    assert done.returncode == 0 and len(answers) == len(questions), done.stderr or answers[-1:]
    return answers


def grid(size, seed):
    values = [(((i + 1) * 40503 + seed * 9973) % 65536 - 32768) / 4096.0 for i in range(size)]
    return torch.tensor(values, dtype=torch.float32)


def bits(tensor):
    flat = tensor.detach().contiguous().view(-1).tolist()
    return "".join(f"{struct.unpack('<I', struct.pack('<f', x))[0]:08x}" for x in flat)


def leaves(sizes):
    return [grid(n, i).requires_grad_() for i, n in enumerate(sizes)]


def number(x):
    return math.inf if x == INF else x


def random_kwargs(rng, name, total):
    """Some of the options of a schedule, and always those that it cannot do without."""
    def maybe(**options):
        return {k: v for k, v in options.items() if rng.random() < 0.6}

    shapes = ["linear", "cosine", "1-sqrt"]
    if name in ("cosine", "cosine_with_restarts"):
        return maybe(num_cycles=rng.choice([1, 2, 3]) if "restarts" in name
                     else rng.choice([0.5, 0.25, 1.5]))
    if name == "polynomial":
        return maybe(lr_end=rng.choice([0.0, 1e-6, 1e-5]), power=rng.choice([0.5, 2.0, 3]))
    if name == "inverse_sqrt":
        return maybe(timescale=rng.choice([1, 50, 12345]))
    if name == "cosine_with_min_lr":
        floor = {"min_lr": 1e-5} if rng.random() < 0.5 else {"min_lr_rate": 0.1}
        return {**maybe(num_cycles=0.25), **floor}
    if name == "warmup_stable_decay":
        return {"num_decay_steps": rng.randrange(1, total // 2 + 1),
                **maybe(num_stable_steps=rng.randrange(total // 2), warmup_type=rng.choice(shapes),
                        decay_type=rng.choice(shapes), min_lr_ratio=0.125, num_cycles=0.4)}
    return {}


NAMES = ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts",
         "polynomial", "inverse_sqrt", "warmup_stable_decay", "cosine_with_min_lr"]


class Schedules(unittest.TestCase):
    @unittest.skipIf(transformers is None, "the package transformers is not here")
    def test_factors_are_those_of_hugging_face(self):
        rng = random.Random(5)
        questions = []
        for _ in range(30):
            for name in NAMES:
                total = rng.randrange(10, 120)
                questions.append({"ask": "schedule", "name": name, "total": total,
                                  # The last is one of a training that was shortened.
                                  "warmup": rng.choice([0, 1, rng.randrange(total // 3 + 1),
                                                        total + 7]),
                                  "lr": rng.choice([1e-3, 3e-4, 0.1]),
                                  "kwargs": random_kwargs(rng, name, total), "steps": total + 15})
        for question, answer in zip(questions, ask(questions)):
            ours = [float(x) for x in answer.split()]
            param = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([param], lr=question["lr"])
            theirs = transformers.get_scheduler(
                question["name"], optimizer, num_warmup_steps=question["warmup"],
                num_training_steps=question["total"], scheduler_specific_kwargs=question["kwargs"])
            rule = theirs.lr_lambdas[0]
            for step, factor in enumerate(ours):
                wanted = float(rule(step))
                self.assertLessEqual(abs(factor - wanted), 4 * math.ulp(max(abs(wanted), 1e-3)),
                                     (question, step))
                # And what the optimizer is really given.
                self.assertAlmostEqual(optimizer.param_groups[0]["lr"], question["lr"] * factor,
                                       delta=1e-12)
                if step < 5:
                    optimizer.step()
                    theirs.step()
                else:
                    optimizer.param_groups[0]["lr"] = question["lr"] * float(rule(step + 1))


    def test_factors_in_steps_are_those_of_pytorch(self):
        rng = random.Random(7)
        schedulers = torch.optim.lr_scheduler
        kinds = {"step": schedulers.StepLR, "multi_step": schedulers.MultiStepLR,
                 "exponential": schedulers.ExponentialLR}
        questions = []
        for _ in range(20):
            gamma = rng.choice([0.1, 0.5, 0.97, 1.25])
            options = {"step": {"step_size": rng.randrange(1, 30), "gamma": gamma},
                       "multi_step": {"milestones": [rng.randrange(60) for _ in range(4)],
                                      "gamma": gamma},
                       "exponential": {"gamma": gamma}}
            for name, kwargs in options.items():
                questions.append({"ask": "schedule", "name": name, "total": 0, "lr": 0.1,
                                  "warmup": rng.choice([0, 0, 1, 9]), "kwargs": kwargs,
                                  "steps": 80})
        questions.append({"ask": "schedule", "name": "step", "total": 0, "lr": 0.1, "warmup": 0,
                          "kwargs": {"step_size": 10}, "steps": 80})
        for question, answer in zip(questions, ask(questions)):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=question["lr"])
            theirs = kinds[question["name"]](optimizer, **question["kwargs"])
            if warmup := question["warmup"]:
                rise = schedulers.LambdaLR(optimizer, lambda s, w=warmup: s / w)
                theirs = schedulers.SequentialLR(optimizer, [rise, theirs], milestones=[warmup])
            for step, factor in enumerate(float(x) for x in answer.split()):
                # PyTorch multiplies again in every step, and each product is rounded.
                wanted = theirs.get_last_lr()[0] / question["lr"]
                self.assertLessEqual(abs(factor - wanted), (step + 4) * math.ulp(wanted),
                                     (question, step))
                optimizer.step()
                theirs.step()


class Clipping(unittest.TestCase):
    def test_norms_and_values_have_torchs_bits(self):
        questions = []
        for sizes in ([1], [3, 1, 17], [1000, 7, 64, 33, 4097]):
            for scale in (1e-3, 1.0, 37.5, INF):
                for norm_type in (2, 1, 3, 0.5, INF):
                    questions.append({"ask": "clip", "sizes": sizes, "scale": scale,
                                      "norm_type": norm_type, "max_norm": 1.0})
                questions.append({"ask": "clip", "sizes": sizes, "scale": scale, "value": 0.5})
        for question, answer in zip(questions, ask(questions)):
            params = leaves(question["sizes"])
            for p in params:
                p.grad = p.detach() * number(question["scale"])
            wanted = ""
            if "value" in question:
                torch.nn.utils.clip_grad_value_(params, question["value"])
            else:
                wanted = bits(torch.nn.utils.clip_grad_norm_(
                    params, question["max_norm"], norm_type=number(question["norm_type"])))
            wanted += "".join(" " + bits(p.grad) for p in params)
            if question["scale"] == INF:  # which of the many nans is the machine's affair
                same = [a == b or (math.isnan(unpack(a)) and math.isnan(unpack(b)))
                        for a, b in zip(hex_floats(answer), hex_floats(wanted))]
                self.assertTrue(all(same) and len(answer) == len(wanted), question)
            else:
                self.assertEqual(answer, wanted, question)


def hex_floats(text):
    return [part[i:i + 8] for part in text.split() for i in range(0, len(part), 8)]


def unpack(digits):
    return struct.unpack("<f", struct.pack("<I", int(digits, 16)))[0]


class Training(unittest.TestCase):
    """GradScaler's scale and tracker after every update, and the parameters at the end."""

    def questions(self):
        base = {"ask": "train", "sizes": [5, 33, 256], "lr": 0.0625, "weight_decay": 0.125,
                "momentum": 0.875, "dampening": 0.0, "nesterov": False, "init_scale": 65536.0,
                "growth_interval": 3, "max_norm": 0.0, "scaled": True}
        factors = [1, 0.5, INF, 2, 1, 1, 0.25, INF, INF, 1, 1, 1, 1, 1, 1, 3, INF, 1]
        for optimizer in ("adamw", "adam", "sgd"):
            for max_norm in (0.0, 1.0):
                yield {**base, "optimizer": optimizer, "max_norm": max_norm, "factors": factors}
            yield {**base, "optimizer": optimizer, "factors": factors, "init_scale": 1000.0}
            yield {**base, "optimizer": optimizer, "factors": [1, 2, 3], "scaled": False}
        yield {**base, "optimizer": "sgd", "factors": factors, "nesterov": True}
        # The first step is skipped: momentum must begin with the second, dampened or not.
        yield {**base, "optimizer": "sgd", "factors": [INF, 1, 1]}
        yield {**base, "optimizer": "sgd", "factors": [INF, 1, INF, 1], "dampening": 0.5}
        yield {**base, "optimizer": "adamw", "factors": [INF, INF, 1, 1]}

    def optimizer(self, question, params, fused):
        common = {"lr": question["lr"], "weight_decay": question["weight_decay"], "fused": fused}
        if question["optimizer"] == "adamw":
            return torch.optim.AdamW(params, **common)
        if question["optimizer"] == "adam":
            return torch.optim.Adam(params, **common)
        return torch.optim.SGD(params, momentum=question["momentum"],
                               dampening=question["dampening"], nesterov=question["nesterov"],
                               **common)

    def reference(self, question, params, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=question["init_scale"],
                                      growth_interval=question["growth_interval"],
                                      enabled=question["scaled"])
        lines = []
        for step, factor in enumerate(question["factors"]):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for p in params:
                loss = loss + (p * grid(p.numel(), 100 + step)).sum() * number(factor)
            scaler.scale(loss).backward()
            if question["max_norm"] > 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, question["max_norm"])
            # The scaler hands a fused SGD a first step to leave out, which then keeps memory that
            # nobody has written as momentum; asked first, it does not see that step at all.
            elif question["scaled"]:
                scaler.unscale_(optimizer)
            if question["scaled"]:
                state = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
                if not sum(v.item() for v in state.values()):
                    optimizer.step()
            else:
                optimizer.step()
            scaler.update()
            lines.append((scaler.get_scale(), scaler._get_growth_tracker()))
        return lines

    def test_steps_and_scales_are_pytorchs(self):
        questions = list(self.questions())
        for question, answer in zip(questions, ask(questions)):
            params = leaves(question["sizes"])
            lines = self.reference(question, params, self.optimizer(question, params, True))
            fields = answer.split()
            ours = [(float(s), int(t)) for s, t in (w.split(":") for w in fields[:len(lines)])]
            if not question["scaled"]:
                lines = [(1.0, 0)] * len(lines)
            self.assertEqual(ours, lines, question)
            self.assertEqual(fields[len(lines):], [bits(p) for p in params], question)


class Rules(unittest.TestCase):
    """Rules beyond Adam and SGD: parameters and state after a few steps."""

    def run_theirs(self, question, make, names):
        params = []
        for i, shape in enumerate(question["shapes"]):
            params.append(grid(math.prod(shape), i).view(shape).clone().requires_grad_())
        optimizer = make(params)
        for step in range(question["steps"]):
            for i, p in enumerate(params):
                p.grad = grid(p.numel(), 100 + 7 * step + i).view(p.shape).clone()
            optimizer.step()
        states = [optimizer.state[p][name] for p in params for name in names(p)]
        return [*params, *states]

    def ask_one(self, **question):
        question = {"ask": "rule", "steps": 4, **question}
        (answer,) = ask([question])
        return question, answer

    def test_muon_is_that_of_pytorch(self):
        for options, theirs in (
                ({}, {}), ({"nesterov": 0, "momentum": 0.5, "lr": 0.25}, {}),
                ({"match_rms_adamw": 1, "weight_decay": 0.0, "ns_steps": 3},
                 {"adjust_lr_fn": "match_rms_adamw"})):
            question, answer = self.ask_one(
                rule="muon", shapes=[[16, 16], [64, 24], [24, 64], [1, 8]], options=options)
            kwargs = {k: v for k, v in options.items() if k != "match_rms_adamw"}
            if "nesterov" in kwargs:
                kwargs["nesterov"] = bool(kwargs["nesterov"])
            wanted = self.run_theirs(question, lambda p: torch.optim.Muon(p, **kwargs, **theirs),
                                     lambda p: ["momentum_buffer"])
            words = answer.split()
            # Momentum is elementwise. The products of the iterations are those of a BLAS, in
            # bfloat16, whose entries have errors of about 2^-8, in each of the steps.
            count = len(question["shapes"])
            self.assertEqual(words[count:], [bits(t) for t in wanted[count:]], options)
            for text, tensor in zip(words[:count], wanted[:count], strict=True):
                ours = torch.tensor([unpack(x) for x in hex_floats(text)]).view(tensor.shape)
                rows, columns = tensor.shape
                ratio = (0.2 * math.sqrt(max(rows, columns)) if theirs
                         else math.sqrt(max(1, rows / columns)))
                bound = question["steps"] * options.get("lr", 1e-3) * ratio * 2 ** -5
                torch.testing.assert_close(ours, tensor.detach(), rtol=0, atol=bound)

    def test_lion_is_the_papers_few_lines(self):
        lr, beta1, beta2, decay = 0.0625, 0.875, 0.96875, 0.5

        class Lion(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})

            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    c = torch.lerp(m, p.grad, 1 - beta1)
                    p.mul_(1 - lr * decay).sub_(lr * c.sign())
                    m.lerp_(p.grad, 1 - beta2)

        question, answer = self.ask_one(
            rule="lion", shapes=[[33], [17, 5], [2, 3, 4]],
            options={"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay})
        wanted = self.run_theirs(question, Lion, lambda p: ["exp_avg"])
        self.assertEqual(answer.split(), [bits(t) for t in wanted])

    def test_rmsprop_is_that_of_pytorch(self):
        base = {"lr": 0.03, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1}
        for options in ({}, base, {**base, "momentum": 0.9}):
            question, answer = self.ask_one(
                rule="rmsprop", shapes=[[33], [17, 5], [2, 3, 4]], options=options)
            names = ["square_avg"] + ["momentum_buffer"] * ("momentum" in options)
            wanted = self.run_theirs(
                question, lambda p: torch.optim.RMSprop(p, foreach=False, **options),
                lambda p: names)
            # The same elementwise operators in the same order: the same bits.
            self.assertEqual(answer.split(), [bits(t) for t in wanted], options)

    @unittest.skipIf(transformers is None, "the package transformers is not here")
    def test_adafactor_is_that_of_transformers(self):
        base = {"lr": 0.03125, "weight_decay": 0.125}
        for options, theirs in (
                (base, {**base, "scale_parameter": False, "relative_step": False}),
                ({**base, "beta1": 0.875, "scale_parameter": 1, "clip_threshold": 0.5},
                 {**base, "beta1": 0.875, "scale_parameter": True, "clip_threshold": 0.5,
                  "relative_step": False}),
                ({"relative_step": 1, "scale_parameter": 1, "warmup_init": 1},
                 {"relative_step": True, "scale_parameter": True, "warmup_init": True})):
            question, answer = self.ask_one(
                rule="adafactor", shapes=[[33], [17, 5], [2, 3, 4], [64, 64]], options=options)

            def names(p):
                squares = ["exp_avg_sq_row", "exp_avg_sq_col"] if p.dim() > 1 else ["exp_avg_sq"]
                return squares + (["exp_avg"] if "beta1" in options else [])

            wanted = self.run_theirs(
                question, lambda p: transformers.optimization.Adafactor(p, **theirs), names)
            for text, tensor in zip(answer.split(), wanted, strict=True):
                ours = torch.tensor([unpack(x) for x in hex_floats(text)])
                # A few roundings of float in each of four steps, in another order: means by rows
                # and columns, and a factor that is rounded once more.
                torch.testing.assert_close(ours, tensor.detach().reshape(-1), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    sys.exit(unittest.main())

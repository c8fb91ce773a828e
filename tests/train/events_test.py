"""TensorBoard's own reader on the event files of real runs: it shows what metrics.jsonl has, also
after a run was resumed or begun again in the same folder. Without the package
(requirements-oracles.txt) the test is skipped."""

import collections
import json
import shutil
import struct
import subprocess
import sys
import time
import unittest

from train_case import BIN, BOUND_S, CONFIG, LOCKSTEP, TrainCase, checkpoints, environment

try:
    from tensorboard.backend.event_processing import event_accumulator
except ImportError as missing:
    print(f"SKIP 1: the package tensorboard is not here ({missing})")
    sys.exit(77)

FLAGS = ("--report_to", "tensorboard", "--eval_strategy", "steps", "--eval_steps", 4,
         "--save_steps", 5)


def single(value):
    """As TensorBoard keeps it: a float of four bytes."""
    return struct.unpack("f", struct.pack("f", value))[0]


def written(output):
    """Every number of metrics.jsonl, as (step, value) by TensorBoard's tag."""
    curves = collections.defaultdict(list)
    for line in (output / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        step = entry.pop("step")
        for name, value in entry.items():
            tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
            curves[tag].append((step, single(value)))
    return dict(curves)


def shown(output):
    reader = event_accumulator.EventAccumulator(str(output / "runs"))
    reader.Reload()
    curves = {tag: [(event.step, event.value) for event in reader.Scalars(tag)]
              for tag in reader.Tags()["scalars"]}
    # A curve of an earlier run alone has no points left.
    return {tag: curve for tag, curve in curves.items() if curve}


class Events(TrainCase):
    def check(self, output, steps):
        curves = shown(output)
        self.assertEqual(curves, written(output))
        for tag in ("train/loss", "train/learning_rate", "train/grad_norm"):
            self.assertEqual([step for step, _ in curves[tag]], list(range(1, steps + 1)), tag)
        self.assertGreater(len({value for _, value in curves["train/loss"]}), steps // 2)
        self.assertEqual([step for step, _ in curves["eval/loss"]],
                         sorted({*range(4, steps + 1, 4), steps}))

    def test_a_resumed_and_a_new_run(self):
        self.config.write_text(CONFIG.replace("samples: 150", "samples: 150, eval_samples: 30"))
        output = self.place / "out"
        self.train(2, output, *FLAGS, "--max_steps", 14)
        self.check(output, 14)
        # As if it had been killed after step 14: the steps after the tenth come again.
        shutil.rmtree(output / "checkpoint-14")
        self.assertEqual(checkpoints(output), [5, 10])
        time.sleep(1.1)  # files are read in the order of their names, which count seconds
        self.train(2, output, *FLAGS, "--max_steps", 17, "--resume", "auto")
        self.check(output, 17)
        time.sleep(1.1)
        # The files of the run before it stay, and TensorBoard drops what they have.
        self.train(0, output, *FLAGS, "--max_steps", 6, "--overwrite_output_dir")
        self.check(output, 6)
        self.assertEqual(len(list((output / "runs").iterdir())), 3)

    def test_a_loop_of_ones_own(self):
        output = self.place / "loop"
        for epochs, steps in ((2, 64), (3, 96)):  # the second run resumes
            subprocess.run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2",
                            BIN / "examples" / "05_own_loop", output, str(epochs)], check=True,
                           timeout=BOUND_S, env=environment(), stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
            curves = shown(output)
            self.assertEqual(curves, written(output))
            self.assertEqual(curves.keys(),
                             {"train/loss", "train/learning_rate", "train/grad_norm"})
            self.assertEqual([step for step, _ in curves["train/loss"]],
                             list(range(10, steps + 1, 10)))
            time.sleep(1.1)


if __name__ == "__main__":
    unittest.main()

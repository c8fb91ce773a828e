"""elastic_gpu: `lockstep train` follows the plan at whatever number of ranks there is."""

import json
import unittest

from train_case import TrainCase, checkpoints

CONFIG = """
model: {name: mlp, hidden: 16}
data: {name: random, samples: 96, features: 8, classes: 4}
global_batch_size: 24
per_device_train_batch_size: 8
num_train_epochs: 1
logging_steps: 1
save_steps: 100
disable_tqdm: true
use_cpu: true
"""


class Elastic(TrainCase):
    def setUp(self):
        super().setUp()
        self.config.write_text(CONFIG)

    def test_the_global_batch_is_the_same_on_one_two_and_four_ranks(self):
        # A rank of two has 12 samples, of four 6: the largest batch below 8 that divides them.
        for ranks, batch, accumulation in ((1, 8, 3), (2, 6, 2), (4, 6, 1)):
            output = self.place / f"out{ranks}"
            done = self.train(ranks, output, "--elastic_gpu")
            self.assertRegex(done.stderr + done.stdout,
                             rf"elastic_gpu: (\S.* on )?{ranks} CPU ranks?: {batch} per device x "
                             rf"{accumulation} accumulation x {ranks} ranks? = global batch 24")
            step = checkpoints(output)[-1]
            self.assertEqual(step, 4)  # 96 samples, 24 a step
            state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
            self.assertEqual(state["train_batch_size"], batch)

    def test_the_batch_of_the_file_need_not_divide_the_global_batch(self):
        done = self.train(3, self.place / "out", "--elastic_gpu", "--global_batch_size", 15)
        self.assertIn("5 per device x 1 accumulation x 3 ranks = global batch 15",
                      done.stderr + done.stdout)

    def test_without_a_global_batch_the_window_of_a_rank_stays(self):
        self.config.write_text(CONFIG.replace("global_batch_size: 24\n",
                                              "gradient_accumulation_steps: 2\n"))
        done = self.train(2, self.place / "out", "--elastic_gpu")
        self.assertIn("8 per device x 2 accumulation x 2 ranks = global batch 32",
                      done.stderr + done.stdout)


if __name__ == "__main__":
    unittest.main()

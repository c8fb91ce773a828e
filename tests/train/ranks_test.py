"""Which samples a run has seen that continued with 2, 1, 4 and 3 ranks, all of them processes.

101 samples divide by nothing. What is then promised: without dataloader_drop_last every sample
comes in every epoch, and at the end of an epoch as many of its first ones come twice as the ranks
of that moment need to have equally many, at most ranks - 1; with it none comes twice, and less than
one batch of every rank is skipped.
"""

import collections
import unittest

from train_case import BIN, LOCKSTEP, TrainCase, checkpoints, finished

SAMPLES, BATCH, EPOCHS = 101, 4, 2
# (ranks, the step after which rank 0 requests a stop, which happens one step later).
# 4 x 2 x 4 + 4 x 1 x 4 + 3 x 4 x 4 = 96 samples: 5 of the first epoch are left for three ranks.
STAGES = ((2, 3), (1, 7), (4, 10), (3, 0))


class Ranks(TrainCase):
    def stages(self, *flags):
        """The numbers of the samples, by epoch, in the order of steps."""
        output = self.place / "out"
        seen = collections.defaultdict(list)
        for stage, (ranks, stop) in enumerate(STAGES):
            log = self.place / f"log{stage}"
            log.mkdir()
            command = [LOCKSTEP, "run", "--standalone", f"--nproc-per-node={ranks}",
                       BIN / "tests" / "train_peer", "samples", log, SAMPLES, stop,
                       "--output_dir", output, "--resume_from_checkpoint", "auto",
                       "--num_train_epochs", EPOCHS, "--per_device_train_batch_size", BATCH,
                       "--save_strategy", "no", "--disable_tqdm", "--use_cpu", *flags]
            done = finished(command)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            lines = [(log / str(rank)).read_text().splitlines() for rank in range(ranks)]
            self.assertEqual(len({len(one) for one in lines}), 1, "ranks made other steps")
            for step in zip(*lines):
                for line in step:
                    epoch, *indices = map(int, line.split())
                    seen[epoch] += indices
        self.assertEqual(checkpoints(output), [4, 8, 11])
        self.assertEqual(sorted(seen), list(range(EPOCHS)))
        return seen

    def test_every_sample_comes_and_the_padding_is_as_stated(self):
        # 5 samples for three ranks are filled up by one, and so are 101.
        for epoch, indices in self.stages().items():
            times = collections.Counter(indices)
            self.assertEqual(sorted(times), list(range(SAMPLES)), f"epoch {epoch}")
            twice = [index for index, count in times.items() if count > 1]
            self.assertEqual(len(indices), SAMPLES + 1)
            self.assertEqual(len(twice), 1)
            self.assertEqual(indices.index(twice[0]), 0, "not the first of the epoch")

    def test_with_drop_last_no_sample_comes_twice(self):
        for epoch, indices in self.stages("--dataloader_drop_last").items():
            self.assertEqual(len(set(indices)), len(indices), f"epoch {epoch}")
            self.assertEqual(len(indices), 96)  # 5 are less than a batch of each of three ranks


if __name__ == "__main__":
    unittest.main()

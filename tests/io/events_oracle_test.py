"""TensorBoard's own reader on our event files. Without the package
(requirements-oracles.txt) the test is skipped."""

import math
import tempfile
import unittest

from io_case import peer, skip

try:
    from tensorboard.backend.event_processing import event_accumulator, event_file_loader
except ImportError as missing:
    skip(f"the package tensorboard is not here ({missing})")


class Oracle(unittest.TestCase):
    def test_reads_what_was_written(self):
        with tempfile.TemporaryDirectory(prefix="lockstep-io-") as directory:
            outcome = peer("events", directory)
            self.assertEqual(outcome.returncode, 0, outcome.stderr)
            path = outcome.stdout.strip()
            events = list(event_file_loader.EventFileLoader(path).Load())
            self.assertEqual(events[0].file_version, "brain.Event:2")
            self.assertEqual([e.step for e in events[1:]], [-1, *range(100), 10**12])
            self.assertEqual(events[8].wall_time, 1006.0)
            self.assertGreater(events[102].wall_time, 1.6e9)  # now
            reader = event_accumulator.EventAccumulator(directory)
            reader.Reload()
            eta = "train/\u03b7"
            self.assertEqual(sorted(reader.Tags()["scalars"]), ["train/loss", "train/lr", eta])
            self.assertEqual([e.value for e in reader.Scalars(eta)], [math.inf])
            losses = [(e.step, e.value) for e in reader.Scalars("train/loss")]
            self.assertEqual([step for step, _ in losses], list(range(100)))
            self.assertAlmostEqual(losses[3][1], 0.25, places=7)

    def test_a_truncated_record_loses_only_itself(self):
        with tempfile.TemporaryDirectory(prefix="lockstep-io-") as directory:
            path = peer("events", directory).stdout.strip()
            with open(path, "r+b") as file:
                file.truncate(file.seek(0, 2) - 3)
            events = list(event_file_loader.EventFileLoader(path).Load())
            self.assertEqual(len(events), 102)


if __name__ == "__main__":
    unittest.main()

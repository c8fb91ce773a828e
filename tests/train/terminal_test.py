"""The progress bar: on a terminal, also under `lockstep run`, and nowhere else."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import unittest

from train_case import BOUND_S, LOCKSTEP, TrainCase, environment

COLUMNS = 90


class Terminal(TrainCase):
    def on_terminal(self, *command):
        """What the terminal gets."""
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        process = subprocess.Popen([str(arg) for arg in command], stdin=subprocess.DEVNULL,
                                   stdout=child, stderr=child, env=environment(),
                                   start_new_session=True)
        os.close(child)
        shown = b""
        try:
            while data := os.read(parent, 65536):
                shown += data
        except OSError:  # EIO: nobody has it open any more
            pass
        os.close(parent)
        self.assertEqual(process.wait(timeout=BOUND_S), 0, shown)
        return shown.decode()

    def train_args(self):
        return (LOCKSTEP, "train", self.config, "--output_dir", self.place / "out",
                "--disable_tqdm", "false", "--overwrite_output_dir")

    def bars(self, shown):
        return re.findall(r"\r((?:\[0\] )?)\x1b\[K( *\d+% \[[= ]+\] \d+/\d+[^\r\n]*)", shown)

    def test_it_shows_under_the_launcher(self):
        for ranks, prefix in ((1, ""), (2, "[0] ")):
            with self.subTest(ranks=ranks):
                shown = self.on_terminal(LOCKSTEP, "run", "--standalone",
                                         f"--nproc-per-node={ranks}", *self.train_args())
                bars = self.bars(shown)
                self.assertTrue(bars, shown)
                self.assertEqual({before for before, _ in bars}, {prefix}, shown)
                for before, bar in bars:
                    self.assertLess(len(before + bar), COLUMNS)
                self.assertTrue(any(bar.startswith("100%") for _, bar in bars), shown)
                self.assertRegex(shown, r"trained \d+ steps")

    def test_redirected_output_has_no_bar(self):
        file = self.place / "file"
        script = f'"$@" > {file}'
        for flags, args in (((), ("bash", "-c", script, "bash", *self.train_args())),
                             (("--tee=1",), self.train_args())):
            with self.subTest(flags=flags):
                shown = self.on_terminal(LOCKSTEP, "run", "--standalone", "--nproc-per-node=2",
                                         *flags, "--no-python", *args)
                self.assertNotIn("\x1b[K", shown)
                self.assertNotIn("\x1b[K", file.read_text())


if __name__ == "__main__":
    unittest.main()

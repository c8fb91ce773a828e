"""The fuzz driver on a parser with planted defects: each is found, saved and reproducible."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
BOUND_S = 60


def driver(*arguments):
    return subprocess.run([PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=BOUND_S, check=False)


class Driver(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep-fuzz-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.corpus = self.folder / "corpus"
        self.corpus.mkdir()
        (self.corpus / "quiet").write_bytes(b"nothing is wrong here")
        self.found = self.folder / "found"

    def defect(self, token, *options):
        path = self.folder / "input"
        path.write_bytes(b"... " + token.encode() + b" ...")
        done = driver("--found", self.found, *options, path)
        self.assertEqual(done.returncode, 1, done.stdout)
        saved = [file.read_bytes() for file in self.found.iterdir()]
        self.assertEqual(saved, [path.read_bytes()], done.stdout)
        return done.stdout

    def test_abort(self):
        out = self.defect("abort")
        self.assertIn("the planted defect", out)
        self.assertIn("was ended by signal 6", out)

    def test_exception(self):
        self.assertIn("not a refusal: the planted exception", self.defect("throw"))

    def test_exit(self):
        self.assertIn("exited with code 3", self.defect("exit"))

    def test_kill(self):
        self.assertIn("was ended by signal 9", self.defect("kill"))

    def test_loop(self):
        self.assertIn("took longer than 0.5", self.defect("loop", "--input-seconds", 0.5))

    def test_memory(self):
        self.assertIn("needed more than 300 MB", self.defect("fill", "--memory-mb", 300))

    def test_clean(self):
        done = driver("--runs", 3000, "--found", self.found, self.corpus)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("runs 3001, inputs 1 + 0", done.stdout)
        self.assertFalse(self.found.exists())

    def test_finds_by_changing_inputs(self):
        dictionary = self.folder / "dictionary"
        dictionary.write_text('# tokens\nword="ab\\x6frt"\n"\\"quoted\\""\n')
        options = ["--runs", 100000, "--dictionary", dictionary, "--found", self.found]
        done = driver(*options, self.corpus)
        self.assertEqual(done.returncode, 1, done.stdout)
        saved = list(self.found.iterdir())
        self.assertEqual(len(saved), 1)
        self.assertIn(b"abort", saved[0].read_bytes())
        # The line that says how to see it again is true, and so is the seed.
        again = driver(saved[0])
        self.assertEqual(again.returncode, 1, again.stdout)
        self.assertIn(f"again: {PROGRAM} {saved[0]}", done.stdout)
        self.assertEqual(driver(*options, self.corpus).stdout.splitlines()[0],
                         done.stdout.splitlines()[0])

    def test_bad_arguments(self):
        self.assertEqual(driver().returncode, 2)
        self.assertEqual(driver("--runs").returncode, 2)
        self.assertEqual(driver("--colour", "red", self.corpus).returncode, 2)
        done = driver(self.folder / "missing")
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no", done.stdout)


if __name__ == "__main__":
    unittest.main()

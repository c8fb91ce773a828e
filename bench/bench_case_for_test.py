"""What the tests of `lockstep bench` share: one benchmark, and the files that it writes."""

import csv
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")


def bench(*arguments, **env):
    return subprocess.run([LOCKSTEP, "bench", *map(str, arguments)], capture_output=True, text=True,
                          timeout=600, stdin=subprocess.DEVNULL, env=os.environ | env)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def passes(self, *arguments):
        """The result, the rows of its CSV file and its JSON document."""
        table, document = self.folder / "a.csv", self.folder / "a.json"
        result = bench(*arguments, "--csv", str(table), "--json", str(document))
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(table, newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            for cell in row.values():
                self.assertIn(cell, result.stdout)
        return result, rows, json.loads(document.read_text())

    def fails(self, code, message, *arguments, **env):
        result = bench(*arguments, **env)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertIn(message, result.stderr)
        return result

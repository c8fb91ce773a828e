"""`lockstep checkpoint import` of archives that a C++ program wrote with torch::save: every tensor
to the bit, and what it says of files that are none."""

import collections
import json
import struct
import sys
import unittest

from train_case import BIN, TrainCase, finished

TYPES = {"Float": "F32", "Double": "F64", "Half": "F16", "BFloat16": "BF16", "Long": "I64",
         "Bool": "BOOL"}
# By torch.save: as now, and as before PyTorch 1.6.
PYTHON = """
import sys, torch
place = sys.argv[1]
state = {"weight": torch.ones(3)}
torch.save(state, place + "/new.pt")
torch.save(state, place + "/old.pt", _use_new_zipfile_serialization=False)
"""


def tensors_in(path):
    """(type, shape, digits) by name: the format is a length, JSON, and bytes."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = (entry["dtype"], entry["shape"], content[start + begin:start + end].hex())
    return found


def number(tensor):
    return struct.unpack("d", bytes.fromhex(tensor[2]))[0]


class Import(TrainCase):
    def import_of(self, archive, code=0):
        folder = self.place / f"imported-{archive.name}"
        done = self.lockstep("checkpoint", "import", archive, folder, code=code)
        self.assertEqual(folder.exists(), code == 0)
        return folder, done

    def written(self):
        """By archive, what archive_peer says it has put into it."""
        done = finished([BIN / "tests" / "archive_peer", self.place])
        self.assertEqual(done.returncode, 0, done.stderr)
        archives = collections.defaultdict(dict)
        for line in done.stdout.splitlines():
            archive, name, kind, shape, digits = line.split("\t")
            shape = [int(size) for size in shape.split(",") if size]
            archives[archive][name] = (TYPES[kind], shape, digits)
        return archives

    def test_every_tensor_to_the_bit(self):
        archives = self.written()
        self.assertEqual(set(archives), {"module.pt", "adamw.pt", "sgd.pt", "list.pt", "all.pt"})
        for archive, wanted in archives.items():
            with self.subTest(archive=archive):
                folder, done = self.import_of(self.place / archive)
                found = tensors_in(folder / "model.safetensors")
                if archive == "sgd.pt":  # the peer reports only its momentum
                    self.assertEqual(number(found.pop("param_groups.0.lr")), 0.25)
                    found = {n: t for n, t in found.items() if n.startswith("state.")}
                self.assertEqual(sorted(found), sorted(wanted))
                self.assertEqual(found, wanted)
                self.verify(folder)
                skipped = "skipped, being neither tensors nor numbers: note\n"
                self.assertTrue(done.stdout.endswith(skipped if archive == "all.pt" else "KiB\n"),
                                done.stdout)
        # Stated by hand: names as a user would look for them.
        self.assertIn("body.1.running_var", archives["module.pt"])
        self.assertEqual(archives["module.pt"]["body.1.num_batches_tracked"][2], "03" + "00" * 7)
        self.assertIn("optimizer.state.0.exp_avg", archives["all.pt"])

    def test_files_of_python_are_refused_with_a_remedy(self):
        done = finished([sys.executable, "-c", PYTHON, self.place])
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("new.pt", "old.pt"):
            _, refused = self.import_of(self.place / name, code=2)
            self.assertRegex(refused.stderr, rf"^lockstep: \[checkpoint\] .*/{name} is not an "
                             r"archive of C\+\+'s torch::save \(.+\)\. Python's torch\.save wrote "
                             r"it\. Export the weights there: ")

    def test_a_torn_file(self):
        self.written()
        whole = (self.place / "module.pt").read_bytes()
        for size in (len(whole) - 1, len(whole) // 2, 4):
            torn = self.place / f"torn{size}.pt"
            torn.write_bytes(whole[:size])
            _, refused = self.import_of(torn, code=2)
            self.assertIn("is not an archive of C++'s torch::save", refused.stderr)
            self.assertIn("It is probably cut short or damaged. Copy it again.", refused.stderr)
        (self.place / "empty.pt").write_bytes(b"")
        _, refused = self.import_of(self.place / "empty.pt", code=2)
        self.assertIn("Give the archive that torch::save wrote.", refused.stderr)

    def test_wrong_arguments(self):
        self.written()
        taken = self.place / "taken"
        taken.mkdir()
        for args, text in ((["import", "a"], "usage: lockstep checkpoint import ARCHIVE FOLDER"),
                           (["import", "/nowhere", "b"], "/nowhere is not a file."),
                           (["import", self.place / "list.pt", taken], "is there already.")):
            self.assertIn(text, self.lockstep("checkpoint", *args, code=2).stderr)


if __name__ == "__main__":
    unittest.main()

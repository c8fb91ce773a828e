"""Our safetensors files against the format's own package, both ways.

We read what the package writes, and write it again byte for byte. Of randomly mutated headers both
accept the same ones, except where the format's specification is stricter than the package. Without
the package (requirements-oracles.txt) the test is skipped.
"""

import json
import os
import random
import struct
import tempfile
import unittest

from io_case import peer, skip

try:
    import numpy
    import safetensors
    from safetensors.numpy import load, save
except ImportError as missing:
    if __name__ != "__main__":
        raise
    skip(f"the package safetensors is not here ({missing})")

DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32",
          "complex64", "float64", "int64", "uint64"]
NAMES = ["a", "b.weight", "wte.weight", "", "with space", "q\"uote", "back\\slash", "new\nline",
         "\u00e9t\u00e9", "\U0001f600", "\x01", "\x7f", "zz" * 50]
SEED = 20240607
FILES = 60
HEADERS = 1500


def random_tensors(rng):
    numbers = numpy.random.default_rng(rng.randrange(2**32))
    tensors = {}
    for name in rng.sample(NAMES, rng.randrange(0, 6)):
        shape = [rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randrange(0, 4))]
        dtype = numpy.dtype(rng.choice(DTYPES))
        raw = numbers.integers(0, 2 if dtype == bool else 256, size=int(numpy.prod(shape))
                               * dtype.itemsize, dtype=numpy.uint8)
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors


def framed(header, data):
    return struct.pack("<Q", len(header)) + header + data


TOKENS = ["0", "1", "2", "4", "8", "16", "-1", "1.0", "1e0", "-0", "00", "18446744073709551615",
          "18446744073709551616", "9223372036854775807", "null", "true", "[]", "{}", '"U8"', '""',
         '"F64"', '"F4"', '"F6_E2M3"', '"Q9"', "[0]", "[1]", "[2,4]", "[0,8]", "[0,4]", "[4,8]",
         "[0,0]", "[0,9223372036854775807,4]", "[9223372036854775807,4,0]", '"\\ud800"',
         '"\\u0041"']


def bent_entry(rng, name, begin, size):
    """A tensor's entry, with something wrong in about half of them."""
    def mostly(right):
        return rng.choice(TOKENS) if rng.random() < .1 else right

    fields = ['"dtype":' + mostly('"U8"'), '"shape":' + mostly(f"[{size}]"),
              '"data_offsets":' + mostly(f"[{begin},{begin + size}]")]
    if rng.random() < .1:
        fields.pop(rng.randrange(3))
    if rng.random() < .1:
        fields.append('"more":' + rng.choice(TOKENS))
    rng.shuffle(fields)
    return f'"{name}":{{{",".join(fields)}}}'


def bent_file(rng):
    entries = []
    at = 0
    for name in rng.sample(["a", "b", "c", "\u00e9", "__metadata__"], rng.randrange(1, 4)):
        if name == "__metadata__":
            values = ['{"format":"pt"}', '{}', '{"a":1}', '{"a":null}', '[]', '"x"', 'null']
            entries.append(f'"{name}":{rng.choice(values)}')
            continue
        size = rng.choice([0, 1, 4, 8])
        entries.append(bent_entry(rng, name, at, size))
        at += size
    rng.shuffle(entries)
    text = "{" + ",".join(entries) + "}"
    if rng.random() < .3:
        place = rng.randrange(len(text))
        insert = rng.choice(["", '"', ",", " ", "}", "\x00", "\\", ":"])
        text = text[:place] + insert + text[place + rng.randrange(2):]
    header = text.encode() + b" " * rng.randrange(3)
    if rng.random() < .05:
        header = header.replace(b"a", b"\xff", 1)
    return framed(header, b"x" * (at + (rng.random() < .05)))


def package_accepts(contents):
    try:
        safetensors.deserialize(contents)
        return True
    except Exception:  # the package's error types changed between its versions
        return False


def stricter(contents):
    """Where the text of the format forbids what the package lets pass."""
    header = contents[8:8 + struct.unpack("<Q", contents[:8])[0]].decode(errors="replace")
    if not header.startswith("{"):
        return True
    twice = []

    def pairs(items):
        keys = [key for key, _ in items]
        twice.extend(key for key in keys if keys.count(key) > 1)
        return dict(items)

    value = json.loads(header, object_pairs_hook=pairs)
    entries = [v for k, v in value.items() if k != "__metadata__"]
    # A tensor as a list, and a null as metadata, are accidents of the package's JSON library.
    return (bool(twice) or value.get("__metadata__", {}) is None
            or any(isinstance(v, list) for v in entries))


class Oracle(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory(prefix="lockstep-io-")
        self.addCleanup(self.directory.cleanup)
        self.rng = random.Random(SEED)

    def path(self, name):
        return os.path.join(self.directory.name, name)

    def write(self, name, contents):
        with open(self.path(name), "wb") as file:
            file.write(contents)
        return self.path(name)

    def rewritten(self, index, contents):
        source = self.write(f"in{index}", contents)
        target = self.path(f"out{index}")
        outcome = peer("rewrite", source, target)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        with open(target, "rb") as file:
            return file.read()

    def test_files_equal_those_of_the_package_byte_for_byte(self):
        for index in range(FILES):
            tensors = random_tensors(self.rng)
            # One entry at most: the package orders several as its hash table does.
            metadata = self.rng.choice([None, {"format": "pt"}])
            contents = save(tensors, metadata)
            again = self.rewritten(index, contents)
            self.assertEqual(again, contents, sorted(tensors))
            read = load(again)
            self.assertEqual(sorted(read), sorted(tensors))
            for name, tensor in tensors.items():
                self.assertEqual(read[name].tobytes(), tensor.tobytes())

    def test_every_type_of_torch(self):
        try:
            import torch
            from safetensors.torch import save as save_torch
        except ImportError as missing:
            self.skipTest(f"no torch ({missing})")
        names = ("bool uint8 int8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float8_e4m3fnuz "
                 "float8_e5m2fnuz int16 uint16 float16 bfloat16 int32 uint32 float32 complex64 "
                 "float64 int64 uint64").split()
        zeros = torch.zeros(16, dtype=torch.uint8)
        contents = save_torch({name: zeros.clone().view(getattr(torch, name))
                               for name in names})
        self.assertEqual(self.rewritten(0, contents), contents)

    def test_both_accept_the_same_headers(self):
        cases = [bent_file(self.rng) for _ in range(HEADERS)]
        paths = [self.write(f"{i}.safetensors", c) for i, c in enumerate(cases)]
        done = peer("judge", input="\n".join(paths) + "\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        outcomes = done.stdout.splitlines()
        self.assertEqual(len(outcomes), len(cases))
        accepted = 0
        for contents, outcome in zip(cases, outcomes):
            theirs, ours = package_accepts(contents), outcome.startswith("ok")
            accepted += ours
            if theirs != ours:
                self.assertTrue(theirs and stricter(contents), (contents, outcome))
        self.assertGreater(accepted, HEADERS // 10)
        self.assertLess(accepted, HEADERS * 9 // 10)


if __name__ == "__main__":
    unittest.main()

"""`lockstep data`: NumPy reads its output as llm.c and nanoGPT do."""
import array
import json
import os
import struct
import subprocess
import tempfile
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")


def lockstep(*args):
    return subprocess.run([LOCKSTEP, "data", *args], timeout=60, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)


def read_llmc(path):
    """As llm.c's dataloader does: 256 int32, then the tokens."""
    with open(path, "rb") as file:
        header = struct.unpack("<256i", file.read(1024))
        kind = {(20240520, 1): "H", (20240801, 7): "I"}[header[:2]]
        tokens = array.array(kind, file.read())
    assert header[2] == len(tokens), header[:3]
    assert not any(header[3:])
    return list(tokens)


class Data(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        os.makedirs(self.path("in/sub"))
        self.texts = {"a.txt": b"first\xff", "b.md": b"second", "sub/c.txt": bytes(range(256)) * 9}
        for name, text in self.texts.items():
            with open(self.path("in/" + name), "wb") as file:
                file.write(text)

    def path(self, name):
        return os.path.join(self.dir.name, name)

    def stream(self, *names):
        return [t for name in names for t in [256, *self.texts[name]]]

    def succeed(self, *args):
        result = lockstep(*args)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")  # no bar where there is no terminal
        return result.stdout

    def refuse(self, *args, code=2):
        result = lockstep(*args)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result.stderr

    def test_shards_have_the_format_of_llmc(self):
        for kind in ("llmc16", "llmc32"):
            out = self.path("out-" + kind)
            text = self.succeed("tokenize", self.path("in"), "--output", out, "--format", kind,
                                "--shard-tokens=1000", "--val-tokens", "10", "--name", "x",
                                "--workers", "2")
            self.assertIn("2319 tokens of 3 documents in 4 shards", text)
            names = sorted(n for n in os.listdir(out) if n.endswith(".bin"))
            self.assertEqual(names, ["x_train_000001.bin", "x_train_000002.bin",
                                     "x_train_000003.bin", "x_val_000000.bin"])
            tokens = read_llmc(os.path.join(out, "x_val_000000.bin"))
            self.assertEqual(len(tokens), 10)
            for name in names[:3]:
                tokens += read_llmc(os.path.join(out, name))
            self.assertEqual(tokens, self.stream("a.txt", "b.md", "sub/c.txt"))

    def test_nanogpt_and_suffixes(self):
        out = self.path("out")
        self.succeed("tokenize", "--output", out, "--format=nanogpt", "--suffix", ".txt",
                     self.path("in"), "--val-tokens=3")
        tokens = []
        for name in ("val.bin", "train.bin"):
            with open(os.path.join(out, name), "rb") as file:
                tokens += array.array("H", file.read())
        self.assertEqual(tokens, self.stream("a.txt", "sub/c.txt"))

    def test_nothing_is_overwritten_without_force(self):
        out = self.path("out")
        args = ("tokenize", "--output", out, self.path("in/a.txt"))
        self.succeed(*args)
        self.assertRegex(self.refuse(*args), r"out is there already\..* replace it with --force\.")
        self.succeed(*args, "--force")
        self.assertEqual(sorted(os.listdir(self.dir.name)), ["in", "out"])  # no remains

    def refuse_unchanged(self, out, *args):
        """With --force, and that nothing below the folder changes."""
        def tree():
            return {os.path.join(where, name): os.lstat(os.path.join(where, name)).st_size
                    for where, folders, files in os.walk(self.dir.name)
                    for name in folders + files}
        before = tree()
        said = self.refuse("tokenize", "--force", "--output", out, *args)
        self.assertEqual(tree(), before)
        return said

    def test_force_replaces_only_what_tokenize_made(self):
        text, out = self.path("in/a.txt"), self.path("out")
        os.mkdir(out)
        self.assertIn("out is not replaced: it has no valid SHA256SUMS, so `lockstep data "
                      "tokenize` did not make it. Name another folder",
                      self.refuse_unchanged(out, text))
        with open(self.path("out/thesis.txt"), "w") as file:
            file.write("years of work")
        self.assertIn("it has no valid SHA256SUMS", self.refuse_unchanged(out + "/", text))
        with open(self.path("out/SHA256SUMS"), "w") as file:
            file.write("{}")
        self.assertIn("it has no valid SHA256SUMS", self.refuse_unchanged(out, text))
        with open(self.path("file"), "w") as file:
            file.write("a file")
        self.assertIn("file is not replaced: it is not a folder",
                      self.refuse_unchanged(self.path("file"), text))
        made = self.path("made")
        self.succeed("tokenize", "--output", made, text)
        os.symlink("made", self.path("link"))
        for name in ("link", "link/"):
            self.assertIn("link is not replaced: it is a symbolic link",
                          self.refuse_unchanged(self.path(name), text))
        with open(self.path("made/notes.txt"), "w") as file:
            file.write("mine")
        self.assertIn("made is not replaced: it holds notes.txt, which is not in its SHA256SUMS",
                      self.refuse_unchanged(made, text))
        os.remove(self.path("made/notes.txt"))
        self.succeed("tokenize", "--force", "--output", made, self.path("in/b.md"))
        self.assertEqual(read_llmc(self.path("made/text_train_000000.bin")), self.stream("b.md"))

    def test_an_input_inside_the_output_is_refused(self):
        made = self.path("made")
        self.succeed("tokenize", "--output", made, self.path("in"))
        shard = self.path("made/text_train_000000.bin")
        os.symlink(shard, self.path("in/link.txt"))
        for args in ([shard], [made], [self.path("in/../made")], [self.path("in")]):
            self.assertRegex(self.refuse_unchanged(made, *args),
                             r"the input \S+ is inside the output \S+made, which would be replaced")
        os.remove(self.path("in/link.txt"))
        # The output inside the input: its own shards would be text the next time.
        inner = self.path("in/shards")
        self.assertIn("is inside the input", self.refuse("tokenize", "--output", inner,
                                                         self.path("in")))
        for flags in ([], ["--force"]):
            self.succeed("tokenize", *flags, "--output", inner, "--suffix=.txt", self.path("in"))
        self.assertIn("is inside the input", self.refuse_unchanged(inner, self.path("in")))
        # The whole input as the output.
        self.assertIn("is inside the output", self.refuse_unchanged(self.path("in"),
                                                                   self.path("in/a.txt")))

    def test_unreadable_text_is_named(self):
        os.symlink("gone", self.path("in/sub/d.txt"))
        self.assertIn("in/sub/d.txt cannot be read (No such file or directory). Check the path, or "
                      "remove a link", self.refuse("tokenize", "--output", self.path("out"),
                                                   self.path("in")))
        os.remove(self.path("in/sub/d.txt"))
        os.mkfifo(self.path("in/sub/d.txt"))
        self.assertIn("d.txt is a named pipe, not a file", self.refuse(
            "tokenize", "--output", self.path("out"), self.path("in")))
        self.assertIn("d.txt is a named pipe, not a file", self.refuse(
            "tokenize", "--output", self.path("out"), self.path("in/sub/d.txt")))
        self.assertFalse(os.path.exists(self.path("out")))

    def test_a_pipe_is_not_inspected(self):
        os.mkfifo(self.path("pipe.bin"))
        os.mkfifo(self.path("pipe.jsonl"))
        for name in ("pipe.bin", "pipe.jsonl"):
            self.assertIn(name, self.refuse("inspect", self.path(name), code=1))

    def test_inspect(self):
        out = self.path("out")
        self.succeed("tokenize", "--output", out, self.path("in/b.md"), self.path("in/a.txt"))
        text = self.succeed("inspect", out, "--show", "9")
        self.assertIn("llmc16, 14 tokens of 2 bytes (1.0 KiB)", text)
        self.assertIn("largest token 256: a vocabulary of 257 or more", text)
        self.assertIn("begins with 256 115 101 99 111 110 100 256 102\n", text)
        self.assertIn("as bytes: <end of text>second<end of text>f\n", text)
        shard = os.path.join(out, "text_train_000000.bin")
        with open(shard, "ab") as file:
            file.write(b"x")
        self.assertRegex(self.refuse("inspect", shard), r"lockstep: \[shards\] .* 14 tokens")
        with open(self.path("raw.bin"), "wb") as file:
            file.write(struct.pack("<3H", 50000, 1, 2))
        self.assertIn("format nanogpt", self.refuse("inspect", self.path("raw.bin")))
        self.assertIn("3 tokens", self.succeed("inspect", "--format=nanogpt", self.path("raw.bin")))
        self.assertNotIn("as bytes", self.succeed("inspect", "--format=nanogpt",
                                                  self.path("raw.bin")))

    def test_inspect_instructions(self):
        path = self.path("x.jsonl")
        with open(path, "w") as file:
            for i in range(3):
                file.write(json.dumps({"instruction": f"ask {i}", "output": "yes",
                                       "answer": "y" * i}) + "\n")
        text = self.succeed("inspect", path)
        self.assertIn("3 instructions, 0 with an input, 3 with an output or answer", text)
        self.assertIn("ask 0\n\n### Response:\n[yes]", text)
        with open(path, "a") as file:
            file.write('{"instruction": "no output"}\n')
        self.assertIn("x.jsonl:4:29: the object that ends here has no 'output'",
                      self.refuse("inspect", path))

    def test_inspect_completions_and_chats(self):
        path = self.path("x.jsonl")
        with open(path, "w") as file:
            file.write(json.dumps({"prompt": "one two", "completion": " three"}) + "\n")
        text = self.succeed("inspect", path)
        self.assertIn("1 prompts with completions; the longest has 13 bytes", text)
        self.assertIn("----\none two[ three]\n----", text)
        with open(path, "w") as file:
            file.write(json.dumps({"messages": [{"role": "user", "content": "one"},
                                                {"role": "assistant", "content": "two"}]}) + "\n")
        text = self.succeed("inspect", path)
        self.assertIn("1 chats with 2 messages, 2 at most", text)
        self.assertIn("----\nuser: one\nassistant: [two]\n----", text)

    def test_mistakes(self):
        self.assertIn("usage: lockstep data", self.refuse())
        self.assertIn("usage: lockstep data", self.succeed("--help"))
        self.assertIn("there is no 'data tokenise'", self.refuse("tokenise"))
        self.assertIn("needs --output FOLDER", self.refuse("tokenize", self.path("in")))
        self.assertIn("Did you mean --output?", self.refuse("tokenize", "--ouput", "x"))
        self.assertIn("--output needs a value", self.refuse("tokenize", "--output"))
        self.assertIn("no token format 'llmc'",
                      self.refuse("tokenize", "--format", "llmc", "--output", "x"))
        self.assertIn("--shard-tokens", self.refuse("tokenize", "--shard-tokens", "many"))
        self.assertIn("inspect needs a file", self.refuse("inspect"))
        self.assertIn("no-such.bin", self.refuse("inspect", self.path("no-such.bin"), code=1))


if __name__ == "__main__":
    unittest.main()

"""lockstep::data::Tokenizer against the packages `tokenizers` and `transformers`.

Ids and decoded texts of 10 000 hard strings for each family of tokenizer.json, and chats by their
templates. Without the packages (requirements-oracles.txt) the test is skipped.
"""
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    import families
    from tokenizers import Tokenizer
except ImportError as missing:
    if __name__ != "__main__":
        raise
    print(f"SKIP 1: the package tokenizers is not here ({missing})")
    sys.exit(77)

PEER = os.path.join(os.environ["LOCKSTEP_BIN"], "tests", "tokenizer_peer")
STRINGS = 10_000
BOUND_S = 600


def peer(*args):
    return subprocess.run([PEER, *map(str, args)], capture_output=True, text=True, timeout=BOUND_S,
                          check=False)


def numbers(values):
    return struct.pack(f"<{len(values) + 1}q", len(values), *values)


def sized(data):
    return struct.pack("<q", len(data)) + data


class Answers:
    def __init__(self, data):
        self.data, self.at = data, 0

    def bytes(self, unit=1):
        (count,) = struct.unpack_from("<q", self.data, self.at)
        begin, self.at = self.at + 8, self.at + 8 + count * unit
        return self.data[begin:self.at]

    def ids(self):
        return [n for (n,) in struct.iter_unpack("<q", self.bytes(8))]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, file, **others):
        for name, content in {"tokenizer.json": file, **others}.items():
            with open(os.path.join(self.folder, name), "w", encoding="utf-8") as out:
                out.write(content if isinstance(content, str) else
                          json.dumps(content, ensure_ascii=False))

    def ask(self, requests):
        path = os.path.join(self.folder, "requests")
        with open(path, "wb") as file:
            file.write(b"".join(requests))
        result = peer("run", self.folder, path, path + ".answers")
        if result.returncode == 2 and "built without them" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(path + ".answers", "rb") as file:
            return Answers(file.read())

    def oracle(self):
        tokenizer = Tokenizer.from_file(os.path.join(self.folder, "tokenizer.json"))
        tokenizer.no_truncation()
        return tokenizer

    def encoded(self, texts):
        """Ours with special tokens and without, for each text."""
        answers = self.ask(b"e" + sized(t if isinstance(t, bytes) else t.encode()) for t in texts)
        return [(answers.ids(), answers.ids()) for _ in texts]

    def compare(self, file, texts):
        self.write(file)
        oracle = self.oracle()
        ours = self.encoded(texts)
        for text, (special, plain) in zip(texts, ours):
            self.assertEqual(special, oracle.encode(text).ids, repr(text))
            self.assertEqual(plain, oracle.encode(text, add_special_tokens=False).ids, repr(text))
        rng = random.Random(len(texts))
        top = oracle.get_vocab_size() + 3
        lists = [special for special, _ in ours]
        lists += [[rng.randrange(top) for _ in range(rng.randrange(12))] for _ in range(2000)]
        # The characters of broken UTF-8: bytes in any order.
        lists += [[rng.randrange(3, 259) for _ in range(rng.randrange(9))] for _ in range(2000)]
        answers = self.ask(b"d" + numbers(ids) for ids in lists)
        for ids in lists:
            for skip in (True, False):
                self.assertEqual(answers.bytes().decode(),
                                 oracle.decode(ids, skip_special_tokens=skip), ids)


class Encoding(Case):
    def test_gpt2(self):
        self.compare(families.gpt2(), families.hard_strings(STRINGS))

    def test_gpt2_with_added_tokens(self):
        self.compare(families.gpt2_with_added_tokens(),
                     [families.without_newer_characters(s) for s in families.hard_strings(STRINGS)])

    def test_llama3(self):
        self.compare(families.llama3(), families.hard_strings(STRINGS))

    def test_llama2(self):
        self.compare(families.llama2(), families.hard_strings(STRINGS))

    def test_phi3(self):
        self.compare(families.phi3(), families.hard_strings(STRINGS))

    def test_qwen2(self):
        self.compare(families.qwen2(), [families.without_newer_characters(s)
                                        for s in families.hard_strings(STRINGS)])

    def test_mistral(self):
        self.compare(families.mistral(), families.hard_strings(STRINGS))

    def test_gemma(self):
        self.compare(families.gemma(), families.hard_strings(STRINGS))

    def test_metaspace(self):
        for scheme in ("first", "always", "never"):
            for split in (False, True):
                with self.subTest(scheme=scheme, split=split):
                    self.compare(families.llama2_metaspace(scheme, split),
                                 families.hard_strings(STRINGS if scheme == "first" else 2000))

    def test_tokens_that_cross_spaces(self):
        self.compare(families.crossing_spaces(), families.hard_strings(STRINGS))

    def test_unknown_characters(self):
        for fuse in (False, True):
            with self.subTest(fuse=fuse):
                self.compare(families.unknown(fuse), families.hard_strings(3000))

    def test_normalizers(self):
        texts = [families.without_newer_characters(s) for s in families.hard_strings(3000)]
        for steps in ([{"type": "NFC"}], [{"type": "NFD"}], [{"type": "NFKC"}], [{"type": "NFKD"}],
                      [{"type": "Lowercase"}],
                      [{"type": "Strip", "strip_left": True, "strip_right": False},
                       {"type": "Strip", "strip_left": False, "strip_right": True}],
                      [{"type": "Replace", "pattern": {"Regex": r" {2,}|\n+"}, "content": "\n"},
                       {"type": "Replace", "pattern": {"String": "e"}, "content": ""}]):
            with self.subTest(steps=steps):
                self.compare(families.normalized(*steps), texts)

    def test_split_behaviors(self):
        for pattern in ({"Regex": r"\s+|\p{N}"}, {"Regex": r"[^\s]+"}, {"String": "e"}):
            for behavior in ("Isolated", "Removed", "MergedWithPrevious"):
                for invert in (False, True):
                    file = families.gpt2()
                    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
                        {"type": "Split", "pattern": pattern, "behavior": behavior,
                         "invert": invert}, file["pre_tokenizer"]]}
                    with self.subTest(pattern=pattern, behavior=behavior, invert=invert):
                        self.compare(file, families.hard_strings(1000))

    def test_every_character_by_itself(self):
        """Letters, numbers and white space as the package has them, in any Unicode version.

        A letter, a number or white space stays in the word of the one before it, and merges with
        it there."""
        self.write(families.joining_first_bytes())
        oracle = self.oracle()
        texts = ["".join(f"x{chr(c)} 1{chr(c)} \n{chr(c)} " for c in range(low, low + 128))
                 for low in range(0, 0x34000, 128) if not 0xD800 <= low < 0xE000]
        for text, (_, plain) in zip(texts, self.encoded(texts)):
            self.assertEqual(plain, oracle.encode(text, add_special_tokens=False).ids,
                             f"U+{ord(text[1]):04X}")

    def test_patterns_that_pcre2_reads_otherwise_are_refused(self):
        for pattern in (r"\w+", r"\bx", r"\h", r"^a", r"a$", r"[a[b]]", r"[a&&b]", r"[\S\n]",
                        r"\p{N}{1,3}+", r"[\P{L}]", r"(a", "a\\"):
            file = families.gpt2()
            file["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern},
                                     "behavior": "Isolated", "invert": False}
            self.write(file)
            result = peer("load", self.folder)
            self.assertEqual(result.returncode, 2, pattern)
            self.assertIn(f"the regular expression '{pattern}'", result.stderr)

    def test_bytes_that_are_not_utf8(self):
        rng = random.Random(1)
        pieces = [b"a", "é".encode(), "日".encode(), "😀".encode(), b"\xff", b"\xc0\x80",
                  b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\x80",
                  b"\xf4\x90\x80\x80", b"\xe0\x9f\xbf"]
        texts = [b"".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))
                 for _ in range(3000)]
        self.write(families.gpt2())
        oracle = self.oracle()
        for text, (_, plain) in zip(texts, self.encoded(texts)):
            self.assertEqual(plain, oracle.encode(text.decode(errors="replace")).ids, text)

    def test_very_long_words(self):
        """100 KB without a place to split: seconds would be quadratic."""
        texts = ["a" * 100_000, "日本" * 20_000, " " * 100_000, "\n" * 100_000, "ab" * 50_000,
                 "!" * 100_000, "1" * 100_000, "<" * 100_000, "'" * 100_000]
        for family in (families.gpt2, families.llama3, families.llama2, families.crossing_spaces):
            with self.subTest(family=family.__name__):
                self.write(family())
                oracle = self.oracle()
                for text, (_, plain) in zip(texts, self.encoded(texts)):
                    self.assertEqual(plain, oracle.encode(text, add_special_tokens=False).ids)


def flagged(content, **flags):
    return {"__type": "AddedToken", "content": content, "lstrip": False, "rstrip": False,
            "normalized": False, "single_word": False, **flags}


class Beside(Case):
    """tokenizer_config.json, special_tokens_map.json and config.json, as AutoTokenizer has them."""

    TEXTS = ["hi<pad>the cat", "a <pad> b", "a <x> b</s>\n<x>", "<|endoftext|> z", "", " THE lead",
             "the <image>\n def", "<x><pad><x>", "return self.x  # <|endoftext|>"]

    def same(self, file, config=None, legacy=None, model=None):
        import transformers
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        others = {"tokenizer_config.json": config, "special_tokens_map.json": legacy,
                  "config.json": model}
        self.write(file, **{name: value for name, value in others.items() if value is not None})
        oracle = transformers.AutoTokenizer.from_pretrained(self.folder).backend_tokenizer
        ours = self.encoded(self.TEXTS)
        for text, (special, plain) in zip(self.TEXTS, ours):
            self.assertEqual(special, oracle.encode(text).ids, text)
            self.assertEqual(plain, oracle.encode(text, add_special_tokens=False).ids, text)
        lists = [special for special, _ in ours]
        answers = self.ask(b"d" + numbers(ids) for ids in lists)
        for ids in lists:
            for skip in (True, False):
                self.assertEqual(answers.bytes().decode(),
                                 oracle.decode(ids, skip_special_tokens=skip), ids)
        return oracle, ours

    def test_special_tokens_that_the_file_lacks(self):
        plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
        listed = {"4000": flagged("<pad>", rstrip=True, special=True),
                  "40": flagged("<|endoftext|>", lstrip=True, special=False)}
        for token in listed.values():
            del token["__type"]
        for file in (families.gpt2(), families.llama2()):
            for config, legacy in (
                    ({"pad_token": "<pad>"}, None),
                    ({"pad_token": "<pad>", "additional_special_tokens": ["<x>", "</s>"],
                      "eos_token": "</s>"}, None),
                    ({"pad_token": flagged("<pad>", lstrip=True, rstrip=True)}, None),
                    ({"pad_token": flagged("<pad>", normalized=True)}, None),
                    ({"extra_special_tokens": ["<x>"], "image_token": "<image>"}, None),
                    ({"extra_special_tokens": {"image_token": "<image>"}}, None),
                    ({}, {"pad_token": "<pad>", "additional_special_tokens": ["<x>"]}),
                    ({"eos_token": "</s>"}, {"eos_token": {"content": "<x>", "lstrip": True}}),
                    ({"added_tokens_decoder": listed, "eos_token": "<|endoftext|>"},
                     {"unk_token": "<x>"})):
                with self.subTest(config=config, legacy=legacy):
                    _, ours = self.same(file, {**plain, **config}, legacy)
                    # There was something to add.
                    bare = self.oracle()
                    self.assertNotEqual([special for special, _ in ours],
                                        [bare.encode(text).ids for text in self.TEXTS])

    def test_gpt2s_class_decides_about_spaces(self):
        spaced, other = families.gpt2(), families.gpt2()
        spaced["pre_tokenizer"]["add_prefix_space"] = True
        other["normalizer"] = {"type": "Lowercase"}
        other["added_tokens"] = []
        named = {"tokenizer_class": "GPT2Tokenizer"}
        for file in (families.gpt2(), spaced, other):
            for config, model in (
                    (named, None), ({**named, "add_prefix_space": True}, None),
                    ({**named, "add_prefix_space": False, "pad_token": "<pad>"}, None),
                    ({"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, None),
                    ({"add_prefix_space": True}, {"model_type": "gpt2"}),
                    (None, {"model_type": "gpt2"}),
                    ({"add_prefix_space": True}, {"model_type": "llama"}),
                    ({**named, "add_prefix_space": True}, {"model_type": "llama"}),
                    ({**named, "add_prefix_space": True}, {"model_type": "phi3"}),
                    ({"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True},
                     {"model_type": "gpt2"})):
                with self.subTest(config=config, model=model):
                    self.same(file, config, None, model)

    def test_classes_of_other_families_read_the_file(self):
        sentence = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        gemma = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
        qwen = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        for family, name, config, model in (
                (families.qwen2, "Qwen2Tokenizer", qwen, "qwen2"),
                (families.gemma, "GemmaTokenizer", gemma, "gemma2"),
                (families.mistral, "LlamaTokenizer", sentence, "mistral"),
                (families.llama2, "LlamaTokenizer", sentence, "mixtral")):
            with self.subTest(family=family.__name__):
                self.same(family(), {**config, "tokenizer_class": name}, None,
                          {"model_type": model})

    def test_gpt2s_class_has_an_end_of_text(self):
        oracle, _ = self.same(families.gpt2(), {"model_max_length": 1024}, None,
                              {"model_type": "gpt2"})
        answers = self.ask([b"i" + sized(b"a") + sized(b"b")])
        self.assertEqual(answers.ids()[-1], oracle.token_to_id("<|endoftext|>"))

    def test_special_tokens_as_text_are_refused(self):
        self.write(families.gpt2(), **{"tokenizer_config.json": {"split_special_tokens": True}})
        result = peer("load", self.folder)
        self.assertEqual(result.returncode, 2)
        self.assertIn("tokenizer_config.json: split_special_tokens is true, which is not supported",
                      result.stderr)


class Shards(Case):
    """`lockstep data tokenize --tokenizer`: shards as llm.c reads them."""

    def setUp(self):
        super().setUp()
        self.texts = {}
        os.mkdir(os.path.join(self.folder, "in"))
        rng = random.Random(7)
        for number in range(12):
            name = os.path.join(self.folder, "in", f"{number:02}.txt")
            self.texts[name] = "".join("".join(families.hard_string(rng))
                                       for _ in range(40 * number))
            with open(name, "wb") as file:
                file.write(self.texts[name].encode())

    def lockstep(self, *args):
        return subprocess.run([os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep"), "data", *args],
                              capture_output=True, text=True, timeout=BOUND_S, check=False)

    def tokenize(self, *args):
        out = os.path.join(self.folder, "out")
        result = self.lockstep("tokenize", os.path.join(self.folder, "in"), "--force", "--output",
                               out, "--tokenizer", self.folder, *args)
        if "built without them" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        tokens = []
        names = sorted(n for n in os.listdir(out) if n.endswith(".bin"))
        self.assertEqual(sorted(os.listdir(out)), sorted(names + ["SHA256SUMS"]))
        for name in sorted(names, key=lambda n: "_train_" in n):
            with open(os.path.join(out, name), "rb") as file:
                header = struct.unpack("<256i", file.read(1024))
                unit = {1: "H", 7: "I"}[header[1]]
                shard = [n for (n,) in struct.iter_unpack("<" + unit, file.read())]
            self.assertEqual(header[2], len(shard))
            tokens += shard
        return tokens

    def expected(self, end):
        oracle = self.oracle()
        return [n for text in self.texts.values() if text
                for n in [end, *oracle.encode(text, add_special_tokens=False).ids]]

    def test_ids_of_the_package(self):
        self.write(families.llama2(), **{"tokenizer_config.json": CONFIG})
        for args in (["--workers", "1"],
                     ["--workers=3", "--shard-tokens", "999", "--val-tokens=77"],
                     ["--format", "llmc32", "--shard-tokens=100000"]):
            self.assertEqual(self.tokenize(*args), self.expected(2), args)
        result = self.lockstep("inspect", "--tokenizer", self.folder, "--show=3",
                               os.path.join(self.folder, "out"))
        self.assertIn("as text: </s>", result.stdout)

    def test_end_of_text(self):
        self.write(families.gpt2())
        refused = self.lockstep("tokenize", "in", "--output", "x", "--tokenizer", self.folder)
        if "built without them" in refused.stderr:
            self.skipTest(refused.stderr)
        self.assertIn("does not say which token ends a text", refused.stderr)
        self.assertEqual(refused.returncode, 2)
        end = self.oracle().token_to_id("<|endoftext|>")
        self.assertEqual(self.tokenize("--end-of-text", "<|endoftext|>"), self.expected(end))
        for args, said in ((["--tokenizer", self.folder, "--end-of-text", "<no>"],
                            "has no token '<no>'"),
                           (["--end-of-text", "<no>"], "--end-of-text is for --tokenizer"),
                           (["--tokenizer", self.folder + "/in"], "there is no ")):
            self.assertIn(said, self.lockstep("tokenize", "in", "--output", "x", *args).stderr)

    def test_ids_need_room(self):
        file = families.llama2()
        for number in range(len(file["model"]["vocab"]), 70_000):
            file["model"]["vocab"][f"<{number}>"] = number
        self.write(file, **{"tokenizer_config.json": CONFIG})
        refused = self.lockstep("tokenize", "in", "--output", "x", "--tokenizer", self.folder)
        self.assertIn("has ids up to 69999, and this format has 2 bytes for each. Write the format "
                      "llmc32", refused.stderr)
        self.assertEqual(self.tokenize("--format=llmc32"), self.expected(2))


class Instructions(Case):
    """data: {name: instructions, tokenizer: DIR}"""

    def rows(self, file, pairs):
        self.write(file, **{"tokenizer_config.json": CONFIG})
        answers = self.ask(b"i" + sized(a.encode()) + sized(b.encode()) for a, b in pairs)
        return [(answers.ids(), answers.ids()[0]) for _ in pairs]

    def test_rows_are_encoded_as_one_text(self):
        texts = [t for t in families.hard_strings(3000) if t]
        pairs = list(zip(texts[::2], texts[1::2])) + [("a", " b"), ("a", "")]
        for family in (families.phi3, families.llama2, families.llama2_metaspace):
            with self.subTest(family=family.__name__):
                ours = self.rows(family(), pairs)
                oracle = self.oracle()
                for (instruction, output), (ids, prompt) in zip(pairs, ours):
                    text = f"### Instruction:\n{instruction}\n\n### Response:\n"
                    whole = oracle.encode(text + output).ids
                    if whole[-1] != 2:
                        whole.append(2)
                    first = oracle.encode(text).ids
                    if first[-1] == 2:
                        first.pop()
                    same = [a == b for a, b in zip(first, whole)] + [False]
                    self.assertEqual((ids, prompt), (whole, same.index(False)), instruction)

    def lockstep(self, *args):
        return subprocess.run([os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep"), *args],
                              capture_output=True, text=True, timeout=BOUND_S, check=False,
                              cwd=self.folder)

    def test_training_file(self):
        self.write(families.phi3(), **{"tokenizer_config.json": CONFIG})
        with open(os.path.join(self.folder, "train.jsonl"), "w", encoding="utf-8") as out:
            for number in range(20):
                out.write(json.dumps({"instruction": f"Say {number}.", "output": "Ja! " * number})
                          + "\n")
        def config(more="", data=""):
            with open(os.path.join(self.folder, "train.yaml"), "w", encoding="utf-8") as out:
                out.write("output_dir: out\nmax_steps: 2\nper_device_train_batch_size: 2\n"
                          "max_seq_len: 64\nmodel: {name: gpt, n_layer: 1, n_head: 2, n_embd: 16"
                          f"{more}}}\n"
                          f"data: {{name: instructions, path: train.jsonl, tokenizer: .{data}}}\n")
            return self.lockstep("config", "check", "train.yaml")
        self.assertEqual(config().returncode, 0, config().stderr)
        small = config(", vocab_size: 300")
        self.assertEqual(small.returncode, 2)
        top = self.oracle().get_vocab_size() - 1
        self.assertRegex(small.stdout + small.stderr,
                         r"the model's vocabulary of 300 is too small for data.tokenizer \S*"
                         rf"tokenizer.json, whose ids go up to {top}. Set model.vocab_size: "
                         rf"{top + 1}")
        missing = config(data="/nowhere")
        self.assertIn("there is no tokenizer './nowhere'", missing.stdout + missing.stderr)
        program = os.path.join(os.environ["LOCKSTEP_BIN"], "..", "libexec", "lockstep-train")
        if not os.path.exists(program):
            self.skipTest("this build has no lockstep-train")
        config()
        result = self.lockstep("train", "train.yaml")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        newest = os.path.join(self.folder, "out", "checkpoint-2", "config.json")
        with open(newest, encoding="utf-8") as file:
            written = json.load(file)
        self.assertEqual(written["vocab_size"], top + 1)
        self.assertEqual(written["eos_token_id"], 2)


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
# Written here from the formats that the families document.
TEMPLATES = {
    "phi3": (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] +"
        " '<|end|>\n' }}{% elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>"
        "\n' }}{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] +"
        " '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"),
    "phi3 with blocks": (
        "{%- for m in messages %}\n  {%- if m.role == 'system' %}\n<|system|>\n{{ m.content }}"
        "<|end|>\n  {% elif m.role == 'user' %}\n<|user|>\n{{ m.content }}<|end|>\n"
        "  {% elif m.role == 'assistant' %}\n<|assistant|>\n{{ m.content }}<|end|>\n"
        "  {% endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "{{- '<|assistant|>\\n' }}\n{%- endif %}\n"),
    "phi3 of any role": (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\\n' + m['content']"
        " + '<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"),
    "phi3 first": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + '\\n' +"
        " m['content'] + '<|end|>' + '\\n' + '<|assistant|>' + '\\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|end|>' + '\\n' }}{% endif %}"
        "{% endfor %}"),
    "phi3.5": (
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}"
        "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] +"
        " '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system ="
        " messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}"
        "{% endif %}{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
        "{% if loop.index0 == 0 and system != false %}{% set text = '<<SYS>>\\n' + system +"
        " '\\n<</SYS>>\\n\\n' + m['content'] %}{% else %}{% set text = m['content'] %}"
        "{% endif %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + text.strip() +"
        " ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + text.strip() + ' ' +"
        " eos_token }}{% endif %}{% endfor %}"),
    "llama3": (
        "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] +"
        " '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"),
    "llama3 always": (
        '{{ bos_token }}{% for m in messages %}{{ "<|start_header_id|>" + m.role +'
        ' "<|end_header_id|>\\n\\n" + m.content | trim + "<|eot_id|>" }}{% endfor %}'
        '{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}'),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] +"
        " '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    "chatml as text": (
        "{% for m in messages %}\n<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}\n{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"),
}
TURNS = ("{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('user and assistant must take turns') }}{% endif %}")
WITHOUT_SYSTEM = {
    "mistral": (
        "{{ bos_token }}" + TURNS + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] +"
        " ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"),
    "mistral, a space after": (
        "{{ bos_token }}" + TURNS + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] +"
        " ' [/INST]' }}{% else %}{{ m['content'] + eos_token + ' ' }}{% endif %}{% endfor %}"),
    "mistral, a space before": (
        "{{ bos_token }}" + TURNS + '{% if m["role"] == "user" %}{{ "[INST] " + m["content"] +'
        ' " [/INST]" }}{% else %}{{ " " + m["content"] + eos_token }}{% endif %}{% endfor %}'),
    "gemma": (
        "{{ bos_token }}" + TURNS + "{% if m['role'] == 'assistant' %}{% set name = 'model' %}"
        "{% else %}{% set name = m['role'] %}{% endif %}{{ '<start_of_turn>' + name + '\\n' +"
        " m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\\n' }}{% endif %}"),
}
TEMPLATES |= WITHOUT_SYSTEM | {
    "mistral with system": (
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set first = messages[0]['content'] %}\n"
        "    {%- set rest = messages[1:] %}\n{%- else %}\n    {%- set rest = messages %}\n"
        "{%- endif %}\n{{- bos_token }}\n{%- for m in rest %}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('user and assistant must take turns') }}\n    {%- endif %}\n"
        "    {%- if m['role'] == 'user' %}\n        {%- if loop.first and first is defined %}\n"
        "            {{- ' [INST] ' + first + '\\n\\n' + m['content'] + ' [/INST]' }}\n"
        "        {%- else %}\n            {{- ' [INST] ' + m['content'] + ' [/INST]' }}\n"
        "        {%- endif %}\n    {%- elif m['role'] == 'assistant' %}\n"
        "        {{- ' ' + m['content'] + eos_token }}\n    {%- endif %}\n{%- endfor %}\n"),
    "qwen2": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nAnswer as a friend would.<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
}
CHATS = [
    [("user", "Why?")],
    [("user", " two  \nlines\u3000"), ("assistant", "\x1canswer "),
     ("user", "\u00a0more 日本 <|end|>")],
    [("system", " Be brief.\n"), ("user", "Why?"), ("assistant", "Because."), ("user", "Oh")],
    [("system", ""), ("user", "")],
]

# The same texts as the templates of these names, with the assistant's part marked.
MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
        "'<|end_header_id|>\\n\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
        "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<start_of_turn>model\\n' }}{% generation %}{{ m['content'] | trim +"
        " '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ '<start_of_turn>' +"
        " m['role'] + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' +"
        " m['content'] + ' [/INST]' }}{% else %}{% generation %}{{ m['content'] + eos_token }}"
        "{% endgeneration %}{% endif %}{% endfor %}"),
}


class Chats(Case):
    @classmethod
    def setUpClass(cls):
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as missing:
            raise unittest.SkipTest(f"the package transformers is not here ({missing})")
        cls.make = staticmethod(PreTrainedTokenizerFast)

    def ask_chats(self, chats):
        requests = []
        for chat in chats:
            for letter in (b"c", b"C"):
                texts = b"".join(sized(t.encode()) for message in chat for t in message)
                requests.append(letter + struct.pack("<q", len(chat)) + texts)
        answers = self.ask(requests)
        return [answers.bytes().decode() for _ in requests]

    def test_templates_of_the_families(self):
        for name, template in TEMPLATES.items():
            for place in ("tokenizer_config.json", "chat_template.jinja"):
                with self.subTest(name=name, place=place):
                    if place == "chat_template.jinja":
                        others = {"chat_template.jinja": template, "tokenizer_config.json": CONFIG}
                    else:
                        others = {"tokenizer_config.json": {**CONFIG, "chat_template": template}}
                    self.write(families.llama2(), **others)
                    oracle = self.make(tokenizer_file=os.path.join(self.folder, "tokenizer.json"),
                                       bos_token="<s>", eos_token="</s>", chat_template=template)
                    without = name == "phi3 first" or name in WITHOUT_SYSTEM
                    chats = CHATS[:2] if without else CHATS
                    ours = iter(self.ask_chats(chats))
                    for chat in chats:
                        messages = [{"role": r, "content": c} for r, c in chat]
                        for prompt in (False, True):
                            self.assertEqual(next(ours), oracle.apply_chat_template(
                                messages, tokenize=False, add_generation_prompt=prompt))
                    if place == "chat_template.jinja":
                        os.remove(os.path.join(self.folder, place))

    def learned(self, file, template, given, chats):
        """Ids of the rows of chats, and which are learned; `given` messages are a prompt."""
        self.write(file, **{"tokenizer_config.json": {**CONFIG, "chat_template": template}})
        answers = self.ask(b"m" + struct.pack("<qq", given, len(chat)) +
                           b"".join(sized(t.encode()) for message in chat for t in message)
                           for chat in chats)
        return [(answers.ids(), answers.ids()) for _ in chats]

    def test_the_assistants_tokens_alone_are_learned(self):
        """As transformers marks them for TRL's assistant_only_loss, and as TRL's
        completion_only_loss has a prompt and its completion."""
        words = [t for t in families.hard_strings(400) if "<" not in t]
        chats = [[("user", a), ("assistant", b), ("user", c), ("assistant", d)]
                 for a, b, c, d in zip(words[::4], words[1::4], words[2::4], words[3::4])]
        chats += [[("system", "Be brief."), ("user", "Why?"), ("assistant", "\nBecause. ")]]
        specials = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
                    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
        with_system = chats
        for name, marked in MARKED.items():
            chats = with_system[:-1] if name in WITHOUT_SYSTEM else with_system
            for family in (families.gpt2, families.llama3, families.llama2):
                file = family()
                there = {token["content"] for token in file["added_tokens"]}
                families.with_added(file, *(s for s in specials if s not in there))
                with self.subTest(name=name, family=family.__name__):
                    ours = self.learned(file, TEMPLATES[name], 0, chats)
                    oracle = self.make(tokenizer_file=os.path.join(self.folder, "tokenizer.json"),
                                       bos_token="<s>", eos_token="</s>", chat_template=marked)
                    for chat, (ids, learned) in zip(chats, ours):
                        messages = [{"role": r, "content": c} for r, c in chat]
                        theirs = oracle.apply_chat_template(messages, return_dict=True,
                                                            return_assistant_tokens_mask=True)
                        self.assertEqual(ids, theirs["input_ids"], chat)
                        self.assertEqual(learned, theirs["assistant_masks"], chat)
                    last = [chat for chat in chats if len(chat) == 4]
                    for chat, (ids, learned) in zip(last, self.learned(file, TEMPLATES[name], 3,
                                                                       last)):
                        messages = [{"role": r, "content": c} for r, c in chat]
                        plain = {"chat_template": TEMPLATES[name], "return_dict": False}
                        prompt = oracle.apply_chat_template(messages[:3], **plain,
                                                            add_generation_prompt=True)
                        whole = oracle.apply_chat_template(messages, **plain)
                        same = [a == b for a, b in zip(prompt, whole)] + [False]
                        border = same.index(False)
                        self.assertEqual(ids, whole)
                        self.assertEqual(learned, [0] * border + [1] * (len(whole) - border))

    def refused(self, template, chat=CHATS[0]):
        self.write(families.llama2(), **{"tokenizer_config.json": {**CONFIG,
                                                                    "chat_template": template}})
        return self.ask_chats([chat])[0]

    def test_other_templates_are_refused(self):
        self.assertIn("Supported are the templates of Phi-3, Llama 2 and Llama 3, Mistral, Gemma",
                      self.refused("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"))
        other = TEMPLATES["chatml"].replace("'<|im_start|>'", "'<|im_start|> '", 1)
        self.assertRegex(self.refused(other), r"tokenizer_config.json: the chat template is not "
                         r"supported: it writes '<\|im_start\|> ")
        default = "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}" + TEMPLATES["chatml"]
        self.assertIn("it writes '<|im_start|>system", self.refused(default))
        self.assertIn("eos_token in another place",
                      self.refused(TEMPLATES["chatml"] + "{{ eos_token }}"))
        # A system prompt that every chat gets, and one that the last user's message gets.
        self.assertIn("it writes '<|im_start|>system", self.refused(
            TEMPLATES["qwen2"].replace("messages[0]['role'] != 'system'", "true")))
        self.assertIn("a system message in another place", self.refused(
            TEMPLATES["mistral with system"].replace("loop.first", "loop.last")))
        self.assertIn("does not call the assistant 'model'", self.refused(
            TEMPLATES["gemma"].replace("'model'", "'assistant'")))
        self.assertIn("it writes '# Tools", self.refused(
            "{% if tools %}{{ '# Tools\\n' }}{% endif %}" + TEMPLATES["qwen2"]))

    def test_messages_without_a_place_are_refused(self):
        self.assertIn("message 0 of the chat is of 'system'",
                      self.refused(TEMPLATES["phi3 first"], CHATS[2]))
        self.assertIn("user and assistant in turn",
                      self.refused(TEMPLATES["llama2"], [("user", "a"), ("user", "b")]))
        for name in WITHOUT_SYSTEM:
            self.assertIn("message 0 of the chat is of 'system', and this template wants user and "
                          "assistant in turn", self.refused(TEMPLATES[name], CHATS[2]))
        self.assertIn("message 1 of the chat is of 'user'",
                      self.refused(TEMPLATES["mistral with system"], [("user", "a")] * 2))


if __name__ == "__main__":
    unittest.main()

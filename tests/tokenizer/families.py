"""tokenizer.json files as the families have them, trained here, and hard strings to encode.

No model is downloaded: the vocabularies come from the sources of Python's own library.
"""
import copy
import functools
import glob
import json
import os
import random
import sysconfig
import unicodedata

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

GPT2_WORDS = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
MARK = "\u2581"
SEED = 20261116


@functools.cache
def corpus():
    """About 2 MB of text, with some of many scripts."""
    files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))
    texts = []
    for path in files:
        with open(path, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
        if sum(map(len, texts)) > 2_000_000:
            break
    rng = random.Random(SEED)
    texts += ["".join(hard_string(rng)) for _ in range(2000)]
    texts.append("日本語のテキスト 中文文本 한국어 텍스트 Ελληνικά русский текст עברית العربية हिन्दी\n" * 50)
    return texts


def token(content, number, special=True, **flags):
    return {"id": number, "content": content, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": not special, "special": special, **flags}


def template(before, after=()):
    pieces = [{"SpecialToken": {"id": t, "type_id": 0}} for t, _ in before]
    pieces += [{"Sequence": {"id": "A", "type_id": 0}}]
    pieces += [{"SpecialToken": {"id": t, "type_id": 0}} for t, _ in after]
    return {"type": "TemplateProcessing", "single": pieces,
            "pair": pieces + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [n], "tokens": [t]}
                               for t, n in [*before, *after]}}


@functools.cache
def trained_bytes(pattern):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return json.loads(tokenizer.to_str())


def byte_level(pattern=GPT2_WORDS):
    return copy.deepcopy(trained_bytes(pattern))


@functools.cache
def trained_characters():
    """Over characters, with <unk>, <s>, </s> and the 256 bytes first, as sentencepiece has it."""
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=4000, special_tokens=specials, limit_alphabet=300,
        initial_alphabet=[MARK, "\x7f", "\n"], show_progress=False))
    file = json.loads(tokenizer.to_str())
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    # Runs of spaces and one token that joins lines, which training word by word does not give.
    for left, right in ((MARK, MARK), (MARK * 2, MARK * 2), (MARK * 4, MARK * 4), ("\n", "\n")):
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    return file


def with_added(file, *contents, **flags):
    """Added tokens after the vocabulary, special unless flags say otherwise."""
    for content in contents:
        number = max(file["model"]["vocab"].get(content, 0), len(file["model"]["vocab"]),
                     *(t["id"] + 1 for t in file["added_tokens"]), 0)
        number = file["model"]["vocab"].get(content, number)
        file["added_tokens"].append(token(content, number, **flags))
    return file


def gpt2():
    file = byte_level()
    with_added(file, "<|endoftext|>")
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    file["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                             "use_regex": True}
    file["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True,
                              "trim_offsets": False, "use_regex": True}
    file["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                       "use_regex": True}
    return file


def gpt2_with_added_tokens():
    """Every flag of added tokens, a prefix space and a normalizer that they differ under."""
    file = gpt2()
    file["normalizer"] = {"type": "NFC"}
    del file["pre_tokenizer"]["use_regex"]
    file["pre_tokenizer"]["add_prefix_space"] = True
    with_added(file, "<left>", lstrip=True)
    with_added(file, "<right>", "\n\n", rstrip=True)
    with_added(file, "<both>", lstrip=True, rstrip=True)
    with_added(file, "word", "ünder", single_word=True, special=False)
    with_added(file, "<raw\u0301>", "<|end", "<|endoftext|>>", special=False, normalized=False)
    with_added(file, "e\u0301<n>", "  ", special=False)
    with_added(file, "the", special=False, normalized=False)
    return file


def joining_first_bytes():
    """Merges x, 1 and a line feed with whatever byte follows within a word."""
    file = gpt2()
    file["added_tokens"] = []
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [[first, byte] for first in ("x", "1", "Ċ") for byte in alphabet]
    tokens = alphabet + [first + byte for first, byte in merges]
    file["model"].update(vocab={t: n for n, t in enumerate(tokens)}, merges=merges)
    return file


def llama3():
    file = byte_level(LLAMA3_WORDS)
    file["model"]["ignore_merges"] = True
    with_added(file, "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
               "<|end_header_id|>", "<|eot_id|>",
               *(f"<|reserved_special_token_{i}|>" for i in range(100)))
    begin = next(t["id"] for t in file["added_tokens"] if t["content"] == "<|begin_of_text|>")
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated",
         "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
         "use_regex": False}]}
    file["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        template([("<|begin_of_text|>", begin)])]}
    file["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                       "use_regex": True}
    return file


def characters():
    file = copy.deepcopy(trained_characters())
    file["added_tokens"] = [token(t, n) for n, t in enumerate(("<unk>", "<s>", "</s>"))]
    file["post_processor"] = template([("<s>", 1)])
    file["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return file


def llama2():
    """The older form: a normalizer, and no pre-tokenizer."""
    file = characters()
    file["pre_tokenizer"] = None
    file["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": MARK},
        {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]}
    return file


def phi3():
    file = llama2()
    file["added_tokens"][2]["rstrip"] = True  # </s>
    with_added(file, "<|endoftext|>")
    with_added(file, "<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|user|>",
               rstrip=True)
    file["post_processor"] = None
    return file


def llama2_metaspace(scheme="first", split=False):
    """The newer form."""
    file = characters()
    file["normalizer"] = None
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme,
                             "split": split}
    file["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}]}
    file["post_processor"] = template([("<s>", 1)], [("</s>", 2)])
    return file


def qwen2():
    """Over bytes, normalized, every digit by itself; ends of turns are special tokens."""
    file = byte_level(QWEN2_WORDS)
    file["normalizer"] = {"type": "NFC"}
    with_added(file, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    with_added(file, "<tool_call>", "</tool_call>", special=False, normalized=False)
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated",
         "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
         "use_regex": False}]}
    for part in ("post_processor", "decoder"):
        file[part] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                      "use_regex": False}
    return file


def mistral():
    """The releases with control tokens."""
    file = llama2_metaspace()
    file["post_processor"] = template([("<s>", 1)])
    with_added(file, "[INST]", "[/INST]", "[TOOL_CALLS]")
    file["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return file


def gemma():
    """No space before a text; runs of spaces and line ends are added tokens."""
    file = characters()
    vocab = file["model"]["vocab"]
    for old, new in (("<s>", "<bos>"), ("</s>", "<eos>")):
        vocab[new] = vocab.pop(old)
    file["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    file["added_tokens"] = [token(t, vocab[t]) for t in ("<unk>", "<bos>", "<eos>")]
    with_added(file, "<pad>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    with_added(file, "\n\n", "\n\n\n", MARK * 2, MARK * 3, "<table>", special=False,
               normalized=False)
    file["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    file["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "},
                             "behavior": "MergedWithPrevious", "invert": False}
    file["post_processor"] = template([("<bos>", 1)])
    file["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return file


def crossing_spaces():
    """A token that has a space after another character: words depend on each other."""
    file = llama2()
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    for left, right in ((",", MARK), ("e", MARK), ("e" + MARK, "a")):
        vocab.setdefault(left + right, len(vocab))
    merges[3:3] = [[",", MARK], ["e", MARK], ["e" + MARK, "a"]]
    return file


def unknown(fuse):
    """Neither bytes nor an alphabet for everything; half of the bytes are there."""
    file = characters()
    file["model"].update(fuse_unk=fuse, byte_fallback=True)
    for byte in range(0x80, 0xA0):
        number = file["model"]["vocab"].pop(f"<0x{byte:02X}>")
        file["model"]["vocab"][f"(gone {byte})"] = number
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "add_prefix_space": True}
    file["decoder"] = None
    return file


def normalized(*steps):
    file = byte_level()
    with_added(file, "<|endoftext|>")
    with_added(file, "<ÀB>", special=False)
    file["normalizer"] = {"type": "Sequence", "normalizers": list(steps)}
    file["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                             "use_regex": True}
    file["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                       "use_regex": True}
    return file


# ---------------------------------------------------------------- strings

PLANES = [(0x20, 0x7F), (0x80, 0x250), (0x300, 0x370), (0x370, 0x590), (0x590, 0x700),
          (0x900, 0xE00), (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2C00), (0x3000, 0x3100),
          (0x3400, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0x10000), (0x10000, 0x20000),
          (0x1F300, 0x1FB00), (0x20000, 0x33480), (0xE0000, 0xE0200), (0xF0000, 0x110000)]
EMOJI = ["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "🇩🇪🇫🇷", "👍🏽", "1️⃣", "☕\ufe0f", "🤷🏾\u200d♂️"]
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028",
          "\u0085", "\u180e", "\u200b", "\x0b", "\x0c", "\x1c", " \t \n", "\u1680", MARK,
          MARK * 3]
CONTRACTIONS = ["don't", "I'm", "we'LL", "they'Re", "he'D", "'s", "it'ſ", "'VE", "y'all'd've",
                "''", "'t's"]
SPECIALS = ["<|endoftext|>", "<|endoftext|", "<|endoftext|>>", "<|end", "<s>", "</s>", "<unk>",
            "<s", "<|begin_of_text|>", "<|reserved_special_token_7|>",
            "<|reserved_special_token_77|>", "<|eot_id|>", "<|user|>", "<|end|>", "<|assistant|>",
            " <|user|>  ", "<left>", "  <left>", "<right>  ", " <both> ", "word", "words",
            "sword", "ünder", "u\u0308nder", "<raw\u0301>", "<n>", "é<n>", "e\u0301<n>", "the",
            "<|im_start|>", "<|im_end|>\n", "[INST] ", " [/INST]", "<start_of_turn>user\n",
            "<end_of_turn>", "<bos>", "<tool_call>", "<table>", "<0x41>", "<0xE2>",
            "<0x", "<ÀB>", "<A\u0300B>", "<àb>"]
DIGITS = ["0", "12", "123", "1234", "12345678901", "3.14", "1,000", "٣٤٥", "²³", "Ⅷ", "½"]
WORDS = ["Berlin", "world", "straße", "İstanbul", "ΣΑΣ", "naïve", "cafe\u0301", "日本語",
         "中文", "한국어", "שלום", "مرحبا", "हिन्दी", "ไทย",
         "Привет", "ﬁ", "ǅ", "x", "_", "def f(x):", "#include <a>", "=>", "!!!", "..."]


def character(rng):
    low, high = rng.choice(PLANES)
    code = rng.randrange(low, high)
    return chr(code)


def hard_string(rng):
    parts = []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8, 13])):
        kind = rng.randrange(10)
        if kind == 0:
            parts.append("".join(character(rng) for _ in range(rng.randrange(1, 9))))
        elif kind == 1:
            parts.append(rng.choice(EMOJI))
        elif kind == 2:
            parts.append("".join(rng.choice(SPACES) for _ in range(rng.randrange(1, 4))))
        elif kind == 3:
            parts.append(rng.choice(CONTRACTIONS))
        elif kind == 4:
            parts.append(rng.choice(SPECIALS))
        elif kind == 5:
            parts.append(rng.choice(DIGITS))
        elif kind == 6:
            parts.append(chr(rng.randrange(0x20)) + chr(rng.choice([0x7F, 0x80, 0x9F, 0xFFFE])))
        elif kind == 7:
            parts.append("a" + "".join(chr(rng.randrange(0x300, 0x370))
                                       for _ in range(rng.randrange(1, 5))))
        else:
            parts.append(rng.choice(["", " "]) + rng.choice(WORDS))
    return parts


def hard_strings(count, seed=SEED):
    rng = random.Random(seed)
    return ["", " ", "a" * 100, *("".join(hard_string(rng)) for _ in range(count - 3))]


@functools.cache
def differs(c):
    """Whether the package normalizes a character otherwise than Python, whose tables are newer."""
    if unicodedata.category(c) == "Cn" or normalizers.Lowercase().normalize_str(c) != c.lower():
        return True
    marked = c + "\u0334"  # its order shows the combining class
    return any(form.normalize_str(marked) != unicodedata.normalize(name, marked)
               for form, name in ((normalizers.NFKD(), "NFKD"), (normalizers.NFD(), "NFD"),
                                  (normalizers.NFC(), "NFC")))


def without_newer_characters(text):
    return "".join(c for c in text if ord(c) < 0x80 or not differs(c))

"""Writes docs/options.md: the fields of every public options struct, as the headers have them.

    python3 tools/options_page.py            write the page
    python3 tools/options_page.py --print    print it

Designated initialisers must follow the order of the fields, so the page keeps it. The meaning of a
field is the first sentence of its comment; of a key of the training file it is the one of
docs/configuration.md. tests/style/options_test.py compares the page with the headers.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "style"))
import api_test  # noqa: E402  pylint: disable=wrong-import-position
import tree  # noqa: E402  pylint: disable=wrong-import-position

PAGE = "docs/options.md"
KEYS = "docs/configuration.md"
# What a caller fills in, besides structs that are called ...Options.
OTHERS = {"TrainingArguments", "CheckpointParts", "TrainerTask", "LoraConfig",
          "GptConfig", "LlamaConfig", "MlpConfig", "ResNetConfig", "Fp8Recipe"}

HEAD = """# Options

The fields of every public options struct in their order, which designated initialisers must keep:
`{.lr = 3e-4, .eps = 1e-6}` compiles, the other way round does not. Generated from the headers by
`tools/options_page.py`; what a header says beyond one sentence is there.
"""


def comment_text(lines):
    """The first sentence of a comment's lines."""
    text = " ".join(line.strip().removeprefix("//").strip() for line in lines)
    return re.split(r"(?<=[a-z)\]\"`0-9])\. (?=[A-Z])", text)[0].rstrip(".")


def split_outside(text, separator):
    """Parts between separators that are in no kind of brackets."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        if depth == 0 and char == separator:
            parts.append(text[begin:at])
            begin = at + 1
        depth += (char in "({[<") - (char in ")}]>")
    return [*parts, text[begin:]]


def declarators(statement):
    """[(type, name, default)] of "double lr = 1e-3, beta = 0.9"."""
    found, kind = [], ""
    for part in split_outside(statement, ","):
        head, *value = split_outside(part, "=")
        head, *braces = split_outside(head, "{")
        words = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", head, re.DOTALL)
        kind = words[1] or kind
        default = value[0] if value else braces[0].rstrip().removesuffix("}") if braces else ""
        found.append((kind, words[2], " ".join(default.split())))
    return found


def fields_of(body, code):
    """(type, name, default, meaning) of each member; `code` is the body without comments."""
    rows, depth, begin = [], 0, 0
    lines, offset = body.split("\n"), 0
    starts = []
    for line in lines:
        starts.append(offset)
        offset += len(line) + 1

    def line_at(position):
        return sum(1 for start in starts if start <= position) - 1

    def meaning(first, last):
        """Of the statement on these lines: the comment above it, or the one behind it."""
        above, at = [], first - 1
        while at >= 0 and lines[at].strip().startswith("//"):
            # The rest of the comment behind the field before is indented as that one is.
            above.insert(0, lines[at])
            at -= 1
        if above and len(above[0]) - len(above[0].lstrip()) == len(lines[first]) - len(
                lines[first].lstrip()):
            return comment_text(above)
        behind = lines[last].split("//", 1)
        if len(behind) < 2:
            return ""
        column, text = lines[last].index("//"), [behind[1]]
        for line in lines[last + 1:]:
            if not line.strip().startswith("//") or line.index("//") != column:
                break
            text.append(line)
        return comment_text(text)

    for at, char in enumerate(code):
        depth += (char in "({[") - (char in ")}]")
        if depth > 0 or char not in ";}":
            continue
        statement = code[begin:at + (char == "}")].strip()
        opened = code[begin:code.index("{", begin)] if char == "}" else ""
        if re.search(r"[=\w]\s*$", opened) and len(split_outside(opened, "(")) == 1:
            continue  # the initialiser in braces of a member, which ends at the semicolon
        first = begin + len(code[begin:at]) - len(code[begin:at].lstrip())
        begin = at + 1
        if char == "}" or re.match(r"(static|using|friend|explicit)\b|$", statement):
            continue
        head = split_outside(split_outside(statement, "=")[0], "{")[0]
        if len(split_outside(head, "(")) > 1 or "operator" in head:
            continue  # a function
        text = meaning(line_at(first), line_at(at))
        rows += [(*one, text) for one in declarators(statement)]
    return rows


def structs(text):
    """(name, body, body without comments) of each struct of a header."""
    code = tree.code_only(text, keep_strings=True)
    for match in re.finditer(r"^struct (\w+)[^;{]*\{", code, re.MULTILINE):
        depth, at = 1, match.end()
        while depth:
            depth += (code[at] == "{") - (code[at] == "}")
            at += 1
        yield match[1], text[match.end():at - 1], code[match.end():at - 1]


def cell(text):
    return text.replace("|", "\\|")


def page(root):
    keys = dict(re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| ([^|]*) \|$", tree.read(root, KEYS),
                           re.MULTILINE))
    text = HEAD
    for path, (_, _, internal) in api_test.rows(root).items():
        if internal:
            continue
        for name, body, code in structs(tree.read(root, path)):
            if not name.endswith("Options") and name not in OTHERS:
                continue
            fields = fields_of(body, code)
            if not fields:  # TORCH_ARG, whose fields are called as functions in any order
                continue
            text += f"\n## {name}\n\n`{path}`\n\n"
            text += "| field | type | default | meaning |\n|---|---|---|---|\n"
            for kind, field, default, meaning in fields:
                if name == "TrainingArguments":
                    meaning = keys.get(field, meaning)
                shown = f"`{cell(default)}`" if default else ""
                text += f"| `{field}` | `{cell(kind)}` | {shown} | {cell(meaning)} |\n"
    return text


def main():
    if "--print" in sys.argv:
        print(page(ROOT), end="")
    else:
        (ROOT / PAGE).write_text(page(ROOT), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

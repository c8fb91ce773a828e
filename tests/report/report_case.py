"""Shared by the tests of reports: what a page must be, whatever is in it."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest
from html.parser import HTMLParser
from xml.etree import ElementTree

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
LOCKSTEP = str(BIN / "lockstep")
BOUND_S = 240  # for what takes seconds, on a machine that is busy
VOID = {"meta"}
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div",
        "table", "tr", "th", "td", "ul", "li", "details", "summary",
        "svg", "g", "rect", "line", "polyline", "circle", "text", "path"}


def environment(**more):
    ours = r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|LOCKSTEP_(?!BIN|SOURCE|PYTHON)"
    env = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**env, "LOCKSTEP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **more}


class Page(HTMLParser):
    """Fails on what is not closed, and collects headings, cells and texts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.rows, self.headings = [], set(), [], []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open
        self.drawings = [ElementTree.fromstring(svg) for svg in
                         re.findall(r"<svg.*?</svg>", text, re.DOTALL)]

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "action"), (tag, name)
            if name != "xmlns":
                assert "://" not in (value or "") or name == "aria-label", (name, value)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)

    def titles(self):
        """Titles of its charts."""
        return [svg.get("aria-label") for svg in self.drawings]

    def row(self, first):
        found = [row for row in self.rows if row and row[0] == first]
        assert len(found) == 1, (first, self.rows)
        return found[0][1:]


class ReportCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep-report-")
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)

    def lockstep(self, *arguments, code=0):
        done = subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True,
                              timeout=BOUND_S, env=environment(), check=False, cwd=self.place,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def page(self, path):
        text = pathlib.Path(path).read_text(encoding="utf-8")
        self.assertIn("default-src 'none'", text)
        self.assertIn("prefers-color-scheme:dark", text)
        self.assertNotRegex(text.replace("http://www.w3.org/2000/svg", ""), r"https?:|url\(|@imp")
        page = Page(text)
        self.assertLessEqual(page.tags, TAGS)
        return page

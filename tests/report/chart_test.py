"""Charts, read by an XML parser: points are where the axes say, names stay text, none overlap."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
from xml.etree import ElementTree

PEER = pathlib.Path(os.environ["LOCKSTEP_BIN"]) / "tests" / "report_peer"
SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "style", "g", "rect", "line", "polyline", "circle", "text", "title", "path"}
HOSTILE = ["<script>alert(1)</script>", '" onload="alert(1)', "]]>&amp;'", "a\tb", "\u0001\u007f",
           "name " * 60, "\u4e2d\u6587\U0001f600", ""]


def draw(chart):
    done = subprocess.run([PEER], input=json.dumps(chart).encode(), capture_output=True, timeout=60,
                          check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def parse(chart):
    root = ElementTree.fromstring(draw(chart))
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in ELEMENTS, element.tag
        for name in element.attrib:
            assert not name.startswith("on") and "href" not in name, name
    return root


def texts(root, kind=None):
    return [e for e in root.iter(SVG + "text") if kind is None or e.get("class") == kind]


def value_of(text):
    match = re.fullmatch(r"(-?[\d.]+)(e-?\d+)?([kMGT]?)", text)
    return float(match[1] + (match[2] or "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[
        match[3]]


def scale(root, kind, log=False):
    """A function from values to pixels, of the first and the last tick."""
    import math  # pylint: disable=import-outside-toplevel
    ticks = sorted((value_of(e.text), float(e.get(kind)) - (4 if kind == "y" else 0))
                   for e in texts(root, kind))
    assert len(ticks) >= 2, ticks
    (v1, p1), (v2, p2) = ticks[0], ticks[-1]
    f = math.log if log else float
    place = lambda v: p1 + (f(v) - f(v1)) / (f(v2) - f(v1)) * (p2 - p1)
    for value, at in ticks:
        assert abs(place(value) - at) < 0.15, (ticks, value)
    return place


def points(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def boxes(root):
    """Boxes of all texts that are not rotated; a character of 12 px is 5.5 px wide on average."""
    found = []
    for element in texts(root):
        if element.get("transform"):
            continue
        x, y = float(element.get("x")), float(element.get("y"))
        width = 5.5 * len(element.text or "")
        left = {"start": x, "middle": x - width / 2, "end": x - width}[element.get("text-anchor")]
        found.append((left, y - 9, left + width, y + 2, element.text))
    return found


class Charts(unittest.TestCase):
    def assert_apart(self, root):
        width = float(root.get("width"))
        height = float(root.get("height"))
        found = boxes(root)
        for i, a in enumerate(found):
            self.assertGreaterEqual(a[0], -1, a)
            self.assertLessEqual(a[2], width + 1, a)
            self.assertLessEqual(a[3], height, a)
            for b in found[i + 1:]:
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
                self.assertTrue(apart, f"{a} and {b}")

    def test_points_are_where_the_axes_say(self):
        for xs, ys in (([0, 10, 20, 35], [1.5, 0.25, 3, 2]), ([1000, 90000], [1e-4, 5e-4]),
                       ([5, 6, 7], [-20, 0, 15]), ([0.1, 0.2], [1e6, 3e6])):
            chart = {"title": "t", "x_label": "step", "y_label": "loss",
                     "lines": [{"name": "a", "points": list(zip(xs, ys))}]}
            root = parse(chart)
            self.assert_apart(root)
            x, y = scale(root, "x"), scale(root, "y")
            (line,) = root.iter(SVG + "polyline")
            drawn = points(line)
            self.assertEqual(len(drawn), len(xs))
            for (px, py), vx, vy in zip(drawn, xs, ys):
                self.assertAlmostEqual(px, x(vx), delta=0.3)
                self.assertAlmostEqual(py, y(vy), delta=0.3)

    def test_logarithmic_axes(self):
        xs, ys = [4096, 65536, 1048576], [3, 45, 900]
        root = parse({"x_log": True, "y_log": True, "lines": [{"points": list(zip(xs, ys))}]})
        x, y = scale(root, "x", True), scale(root, "y", True)
        (line,) = root.iter(SVG + "polyline")
        for (px, py), vx, vy in zip(points(line), xs, ys):
            self.assertAlmostEqual(px, x(vx), delta=0.3)
            self.assertAlmostEqual(py, y(vy), delta=0.3)
        # Both begin at the frame and end at it.
        self.assertEqual(len(list(root.iter(SVG + "polyline"))), 1)

    def test_values_that_are_not_finite_leave_a_gap(self):
        chart = {"lines": [{"points": [[1, 1], [2, 2], [3, None], [4, 3], [5, None], [6, 1],
                                       [7, 2]]}]}
        root = parse(chart)
        self.assertEqual([len(points(e)) for e in root.iter(SVG + "polyline")], [2, 2])
        self.assertEqual(len(list(root.iter(SVG + "circle"))), 1)  # the value between two gaps

    def test_names_stay_text(self):
        lines = [{"name": name, "points": [[1, i], [2, i + 1]], "labels": [name[:10], ""],
                  "marked": True} for i, name in enumerate(HOSTILE)]
        for name in HOSTILE:
            charts = [{"title": name, "x_label": name, "y_label": name, "lines": lines,
                       "marks": [[1.5, name]]},
                      {"kind": "bars", "title": name, "x_label": name, "parts": HOSTILE,
                       "bars": [{"label": name, "values": [1] * len(HOSTILE)}]},
                      {"kind": "columns", "title": name, "parts": HOSTILE,
                       "columns": [{"from": 0, "to": 1, "values": [1] * len(HOSTILE)}]}]
            for chart in charts:
                root = parse(chart)
                shown = "".join("".join(e.itertext()) for e in texts(root))
                start = re.sub(r"[\u0001\u007f]", "\ufffd", name[:12])
                self.assertIn(start, shown)

    def test_texts_do_not_overlap(self):
        names = [f"rank {i}" for i in range(24)]
        lines = [{"name": n, "points": [[0, i], [1e6, 2 * i]], "marked": i % 2 == 0}
                 for i, n in enumerate(names)]
        marks = [[x * 1e4, f"resumed {x}"] for x in range(0, 100, 3)]
        root = parse({"title": "A title " * 20, "x_label": "x " * 100, "y_label": "y " * 100,
                      "lines": lines, "marks": marks})
        self.assert_apart(root)
        self.assertEqual([e.text for e in texts(root, "legend")], names)
        long = [f"a name that is long, number {i}" for i in range(9)]
        self.assert_apart(parse({"kind": "bars", "title": "t", "x_label": "ms", "parts": long,
                                 "bars": [{"label": n, "values": [i + 1, 2, 3, 4, 0.01, 5, 6, 7, 8]}
                                          for i, n in enumerate(long)]}))
        for count in 1, 2, 3, 8:
            ranks = [2 ** i for i in range(count)]
            root = parse({"x_from_zero": True, "y_from_zero": True, "ticks_at_points": True,
                          "x_label": "ranks", "y_label": "times", "title": "Speed-up",
                          "lines": [{"name": "measured", "marked": True,
                                     "points": [[r, 0.9 * r] for r in ranks],
                                     "labels": [f"{0.9 * r:.2f}x" if i > count - 3 else ""
                                                for i, r in enumerate(ranks)]},
                                    {"name": "ideal", "reference": True,
                                     "points": [[r, r] for r in ranks]}]})
            self.assert_apart(root)

    def test_many_points_are_thinned_and_their_extremes_stay(self):
        values = [[i, (i * 7919) % 1000] for i in range(200000)]
        values[123456][1], values[654][1] = 5000, -5000
        chart = {"lines": [{"points": values}]}
        self.assertLess(len(draw(chart)), 100000)
        root = parse(chart)
        y = scale(root, "y")
        (line,) = root.iter(SVG + "polyline")
        drawn = [py for _, py in points(line)]
        self.assertAlmostEqual(min(drawn), y(5000), delta=0.3)
        self.assertAlmostEqual(max(drawn), y(-5000), delta=0.3)

    def test_bars_are_as_long_as_their_values(self):
        chart = {"kind": "bars", "title": "t", "x_label": "milliseconds", "parts": ["a", "b", "c"],
                 "bars": [{"label": "rank 0", "values": [10, 20, 10]},
                          {"label": "rank 1", "values": [0, 5, 75]}]}
        root = parse(chart)
        self.assert_apart(root)
        x = scale(root, "x")
        rects = [e for e in root.iter(SVG + "rect") if e.find(SVG + "title") is not None]
        spans = [(float(e.get("x")), float(e.get("width"))) for e in rects]
        expected = [(0, 10), (10, 20), (30, 10), (0, 5), (5, 75)]
        self.assertEqual(len(spans), len(expected))
        for (at, width), (before, value) in zip(spans, expected):
            self.assertAlmostEqual(at, x(before), delta=0.3)
            self.assertAlmostEqual(width, x(value) - x(0), delta=0.3)
        shown = [e.text for e in texts(root)]
        for text in "40", "80", "25 %", "50 %", "94 %", "rank 0", "rank 1", "a", "b", "c":
            self.assertIn(text, shown)

    def test_columns_are_shares_and_gaps_stay_open(self):
        chart = {"kind": "columns", "title": "t", "x_label": "seconds", "parts": ["a", "b"],
                 "columns": [{"from": 0, "to": 10, "values": [1, 3]},
                             {"from": 30, "to": 40, "values": [5, 5]}]}
        root = parse(chart)
        self.assert_apart(root)
        x = scale(root, "x")
        first, second = root.iter(SVG + "path")
        found = [[tuple(map(float, m)) for m in re.findall(
            r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+z", e.get("d"))] for e in (first, second)]
        self.assertEqual([len(f) for f in found], [2, 2])
        zero, full = found[0][0][1], found[1][0][3]
        for (left, low, right, high), (share, begin) in zip(found[0], ((0.25, 0), (0.5, 30))):
            self.assertAlmostEqual(left, x(begin), delta=0.3)
            self.assertAlmostEqual(right, x(begin + 10), delta=0.3)
            self.assertAlmostEqual(low, zero, delta=0.3)
            self.assertAlmostEqual((zero - high) / (zero - full), share, delta=0.01)

    def test_a_file_follows_light_and_dark(self):
        text = draw({"lines": [{"points": [[1, 1], [2, 2]]}]}).decode()
        self.assertIn("prefers-color-scheme:dark", text)
        self.assertIn('class="page"', text)


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=1).result.wasSuccessful() else 1)

"""The dashboard's page in a real browser: it draws, follows the run, and takes text for text.

    python3 tests/dashboard/browser_test.py --screenshots DIR   pictures of the page, to look at;
                                                                DIR/dashboard.png is the README's
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

import browser
from dashboard_case import LOCKSTEP, DashboardCase, FINDING, Server, state

PROGRAM = browser.find()
HOSTILE = ['<img src=x onerror="window.hacked=1">', "<script>window.hacked=1</script>",
           "javascript:window.hacked=1", "\"'><svg onload=window.hacked=1>", "${window.hacked=1}"]
TABLE = "document.querySelector('#ranks').innerText"


@unittest.skipUnless(PROGRAM, "no Chromium is here (Debian's package chromium-headless-shell)")
class Page(DashboardCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = browser.Browser(PROGRAM)

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()

    def setUp(self):
        self.server = self.serve()
        self.page = self.browser
        self.page.open("about:blank")  # what the page of another test says is not this one's
        self.page.wait("location.href == 'about:blank'")
        self.page.call("Network.clearBrowserCookies")
        self.page.look()
        self.page.problems.clear()
        self.page.console.clear()

    def open(self, value=None):
        if value is not None:
            self.server.set(value)
            self.eventually(lambda: json.loads(self.server.request("/snapshot")[2]) == value,
                            "the state")
        self.page.open(self.server.url)
        self.page.wait("document.querySelectorAll('#ranks tr').length > 0")

    def check_quiet(self):
        self.page.value("1")  # what was on its way has arrived
        self.assertEqual(self.page.problems, [])
        self.assertEqual(self.page.console, [])

    def test_draws_and_follows_the_run(self):
        self.open(state(10, gpus=True, findings=[FINDING]))
        self.assertEqual(self.page.value("location.search"), "", "the token is in the address")
        cookie, = self.page.call("Network.getCookies", urls=[self.server.url])["cookies"]
        self.assertEqual((cookie["value"], cookie["httpOnly"], cookie["sameSite"]),
                         (self.server.token, True, "Strict"))
        for text in ("Rank 0", "Rank 1", "73 %", "58.0 GiB", "all_reduce #90"):
            self.assertIn(text, self.page.value(TABLE))
        for row, power in enumerate(("GPU 0, 612 W", "GPU 1, 603 W")):
            self.assertIn(power, self.page.value(
                f"document.querySelectorAll('#ranks tr')[{row}].innerText"))
        self.assertIn("loader-bound", self.page.value("document.body.innerText"))
        self.assertIn("about 24 %", self.page.value("document.body.innerText"))
        self.assertEqual(self.page.value("document.querySelectorAll('#charts .curve').length"), 6)
        self.assertEqual(self.page.value("document.querySelectorAll('#budget .bar i').length"), 12)
        for step in (11, 25, 1234):
            self.server.set(state(step))
            self.page.wait(f"{TABLE}.includes('{step:,}')")
        self.assertIn("live", self.page.value("document.querySelector('#live').innerText"))
        self.assertIn("Nothing found", self.page.value("document.body.innerText"))
        # A run without a Trainer, which logs no throughput.
        self.server.set(state(1240, series={"step_ms": [[1, 20.0], [2, 20.0]]}))
        self.page.wait("document.querySelector('#tiles').innerText.includes('steps/s')")
        self.check_quiet()

    def test_shows_what_people_look_for(self):
        self.open(state(240, gpus=True))
        text = self.page.value("document.querySelector('#tiles').innerText")
        tiles = [line.strip() for line in text.split("\n") if line.strip()]
        shown = dict(zip(tiles[::2], tiles[1::2]))
        self.assertEqual(shown["Step"], "240 of 1,000")
        self.assertEqual(shown["Time left"], "38:00")
        self.assertRegex(shown["Evaluation loss"], r"^\d\.\d{3}$")
        self.assertEqual(shown["Learning rate"], "3.00e-4")
        self.assertRegex(shown["Gradient norm"], r"^\d\.\d{3}$")
        for series in (None, {"loss": [[1, 2.0], [2, 1.0]]},
                       {name: [[1, 2.0], [2, 3.0]] for name in
                        ("loss", "Loss", "tokens_per_second", "samples_per_second", "accuracy",
                         "eval_runtime", "step_ms")}):
            self.server.set(state(241, series=series))
            wanted = len(series) - ("eval_runtime" in series) if series else 7
            self.page.wait(f"document.querySelectorAll('#charts .chart').length == {wanted}")
            for width in (1280, 700, 390):
                self.page.look(width=width, height=844)
                charts = json.loads(self.page.value(
                    "JSON.stringify(Array.from(document.querySelectorAll('#charts .chart'), (c) => "
                    "[c.querySelector('h2').innerText, c.getBoundingClientRect().width]))"))
                self.assertEqual(len({title for title, _ in charts}), len(charts), charts)
                widths = {round(pixels) for _, pixels in charts}
                self.assertEqual(len(widths), 1, charts)
                self.assertLess(widths.pop(), 0.6 * width if width == 1280 else width, charts)
        # A learning rate that hardly changes: the lines of its chart have texts of their own.
        self.server.set(state(242, series={"learning_rate": [[s, 3e-3 - 1e-7 * s] for s in
                                                             range(1, 900)]}))
        self.page.wait("document.querySelectorAll('#charts .chart').length == 1")
        labels = json.loads(self.page.value(
            "JSON.stringify(Array.from(document.querySelectorAll('#charts [text-anchor=end]'), "
            "(t) => t.textContent))"))
        self.assertEqual(len(set(labels)), len(labels), labels)
        self.assertIn("0.00295", labels)
        self.check_quiet()

    def test_updates_leave_the_focus_and_the_nodes_alone(self):
        self.open(state(10))
        self.page.value("window.row = document.querySelector('#ranks tr');"
                        "document.querySelector('#log-rank').focus()")
        self.server.set(state(99))
        self.page.wait(f"{TABLE}.includes('99')")
        self.assertTrue(self.page.value("window.row === document.querySelector('#ranks tr')"))
        self.assertEqual(self.page.value("document.activeElement.id"), "log-rank")
        self.check_quiet()

    def test_a_killed_rank_shows(self):
        self.open(state(10))
        self.assertTrue(self.page.value("document.querySelector('#banner').hidden"))
        self.server.set(state(12, failed=1))
        self.page.wait("document.querySelector('tr.failed')")
        self.assertIn("failed: killed by SIGKILL",
                      self.page.value("document.querySelector('tr.failed').innerText"))
        self.assertIn("Rank 1 on this host failed: killed by SIGKILL.",
                      self.page.value("document.querySelector('#banner').innerText"))
        self.assertEqual(self.page.value("document.querySelector('#state').innerText"), "failed")
        self.assertIn("c10::Error", self.page.value("document.querySelector('#log').innerText"))
        self.assertIn("failed", self.page.value("document.title"))
        # The launcher, which ends the others, has not said more yet.
        ending = state(12, failed=1)
        ending["run"] |= {"state": "running", "message": ""}
        self.server.set(ending)
        self.page.wait("document.querySelector('#banner').innerText =="
                       "'Rank 1 failed (killed by SIGKILL).'")
        self.assertEqual(self.page.value("document.querySelector('#state').innerText"), "failed")
        self.check_quiet()

    def test_a_run_that_is_over_says_what_happened_and_nothing_of_now(self):
        over = state(120, run_state="failed", failed=1)
        over["run"]["message"] = "Rank 1 on n2 failed: killed by SIGKILL. It comes from outside."
        self.open(state(119))
        tiles = "document.querySelector('#tiles').innerText"
        self.assertIn("Ranks running", self.page.value(tiles))
        self.server.set(over)
        self.page.wait("document.querySelector('#banner').innerText.includes('from outside')")
        shown = self.page.value(tiles)
        self.assertIn("Step time", shown)
        for title in ("Ranks running", "CPU", "Time left"):
            self.assertNotIn(title, shown)
        self.check_quiet()

    def test_what_is_not_known_is_left_away(self):
        script = state(0, series={})
        for rank in script["ranks"]:
            rank |= {"step": None, "step_ms": None, "phase": "", "budget": {}, "position": None,
                     "threads": 1}
        self.open(script)
        tiles = self.page.value("document.querySelector('#tiles').innerText")
        for title in ("Step", "Loss", "Throughput"):
            self.assertNotIn(title, tiles)
        text = self.page.value("document.querySelector('main').innerText")
        self.assertIn("1 thread\n", text + "\n")
        for title in ("Phase", "Last collective", "Step budget"):
            self.assertNotIn(title, text)
        self.check_quiet()

    def test_numbers_that_are_not_finite_show(self):
        self.open(state(10, series={"loss": [[1, 2.0], [2, 1.5], [3, None], [4, 1.0], [5, None]],
                                    "grad_norm": [[5, None]]}))
        tiles = self.page.value("document.querySelector('#tiles').innerText").split()
        for name in ("Loss", "norm"):
            at = tiles.index(name)
            self.assertEqual(tiles[at + 1:at + 3], ["not", "finite"])
        self.assertEqual(self.page.value("document.querySelectorAll('#charts .chart').length"), 1)
        self.assertEqual(self.page.value("document.querySelector('#charts .now').innerText"),
                         "not finite")
        self.assertEqual(self.page.value("document.querySelector('#charts .curve')"
                                         ".getAttribute('d').split('M').length"), 3, "no gap")
        self.check_quiet()

    def test_a_report_fits_a_phone(self):
        with tempfile.TemporaryDirectory() as place:
            place = pathlib.Path(place)
            names = ("baseline_of_this_week", "another_learning_rate")
            for name in names:
                (place / name).mkdir()
                (place / name / "metrics.jsonl").write_text("".join(
                    json.dumps({"step": s, "loss": 3 / s, "eval_loss": 4 / s,
                                "samples_per_second": 70.5, "tokens_per_second": 5009.1}) + "\n"
                    for s in range(1, 30)))
            subprocess.run([LOCKSTEP, "report", *(place / name for name in names), "-o",
                            place / "r.html"], check=True, capture_output=True, timeout=60)
            self.page.look(width=390, height=844, mobile=True)
            self.page.open(f"file://{place / 'r.html'}")
            self.page.wait("document.querySelectorAll('td').length > 10")
            self.assertLessEqual(self.page.value("document.documentElement.scrollWidth"), 390)
            # A column of names that is one letter wide cannot be read.
            self.assertGreater(self.page.value("document.querySelector('td').clientWidth"), 60)
            self.assertEqual(self.page.value(
                "document.querySelectorAll('#charts .chart:first-child .curve').length"), 2)
            text = self.page.value("document.body.innerText")
            for part in ("two runs", *names, "lowest evaluation loss", "second / first",
                         "The configuration of one of them is not recorded."):
                self.assertIn(part, text)
            for part in ("Ranks running", "Step budget", "Output"):
                self.assertNotIn(part, text)
            self.check_quiet()

    def test_a_finished_run_shows_what_its_report_lists(self):
        with tempfile.TemporaryDirectory() as place:
            place = pathlib.Path(place)
            (place / "monitor").mkdir()
            (place / "monitor" / "run.json").write_text(json.dumps(
                {"world_size": 1, "program": "trainer", "started_unix_s": 1e9, "total_steps": 9,
                 "ended_unix_s": 1e9 + 5}))
            (place / "monitor" / "rank_0.jsonl").write_text("".join(
                json.dumps({"unix_time_s": 1e9 + s, "seconds": 1, "step": 2 * s, "steps": 2,
                            "host_s": {"forward": 1}}) + "\n" for s in range(1, 5)))
            (place / "metrics.jsonl").write_text("".join(
                json.dumps({"step": s, "loss": 3 / s}) + "\n" for s in range(1, 9)) +
                json.dumps({"step": 9, "train_runtime": 5}) + "\n")
            (place / "effective_config.json").write_text(json.dumps({"settings": {
                "seed": {"value": 7, "from": "--seed"},
                "run_name": {"value": HOSTILE[0], "from": "train.yaml:3:1"},
                "optim": {"value": "adamw", "from": "default"}}}))
            served = subprocess.Popen([LOCKSTEP, "dashboard", place], stdout=subprocess.PIPE,
                                      stdin=subprocess.DEVNULL, text=True)
            try:
                self.page.look(width=390, height=844, mobile=True)
                self.page.open(served.stdout.readline().split()[1])
                self.page.wait("document.querySelectorAll('#tables table').length > 2")
                text = self.page.value("document.querySelector('#tables').innerText")
                for part in ("Figures", "There is no checkpoint.", "Events", "--seed", HOSTILE[0],
                             "The run ended, 5 s after its last start.", "1 defaults"):
                    self.assertIn(part, text)
                self.assertNotIn("lowest evaluation loss", text)
                self.assertEqual(self.page.value("document.querySelectorAll('main img').length"), 0)
                self.assertLessEqual(self.page.value("document.documentElement.scrollWidth"), 390)
                self.page.look()
                listed = self.page.value("document.querySelector('#tables').textContent")
                self.page.value("window.card = document.querySelector('#tables').firstChild")
                time.sleep(1.5)
                self.assertTrue(self.page.value(
                    "window.card === document.querySelector('#tables').firstChild"))
                self.check_quiet()
                # The same in a file, which needs no server.
                subprocess.run([LOCKSTEP, "report", place], check=True, capture_output=True,
                               timeout=60)
                self.page.open(f"file://{place / 'report.html'}")
                self.page.wait("document.querySelectorAll('#tables table').length > 2")
                self.assertEqual(self.page.value("document.querySelector('#tables').textContent"),
                                 listed)
                self.assertIn("Rank 0: where its time went",
                              self.page.value("document.querySelector('#charts').innerText"))
                self.assertTrue(self.page.value("document.querySelector('#live').hidden"))
                self.assertIsNone(self.page.value("window.hacked ?? null"))
                self.assertTrue(self.page.value(
                    "document.querySelector('.brand img').naturalWidth > 0"), "the icon")
                self.check_quiet()
            finally:
                served.kill()
                served.wait(timeout=60)
                served.stdout.close()

    def drawn(self, index):
        """The texts of a chart's svg with their boxes, and its points."""
        found = json.loads(self.page.value(
            "JSON.stringify((([svg]) => [Array.from(svg.querySelectorAll('text'), (e) => {"
            "const b = e.getBBox(); return [e.textContent, b.x, b.y, b.width, b.height,"
            " e.getAttribute('text-anchor')]}),"
            "Array.from(svg.querySelectorAll('circle'), (e) => [e.cx.baseVal.value,"
            f"e.cy.baseVal.value])])([document.querySelectorAll('#charts svg')[{index}]]))"))
        texts, circles = found
        for i, (a, x, y, width, height, _) in enumerate(texts):
            self.assertTrue(-1 <= x and x + width <= 372, (a, x, width))
            for b, u, v, wide, high, _ in texts[i + 1:]:
                self.assertTrue(x + width <= u + 1 or u + wide <= x + 1 or
                                y + height <= v + 3 or v + high <= y + 3, (a, b))
        return texts, circles

    def test_charts_are_where_their_axes_say(self):
        xs = [4096, 65536, 1 << 20, 1 << 24]
        charts = [
            {"title": "log", "x_label": "size", "y_label": "us", "log": True, "dots": True,
             "x_ticks": [[x, f"{x >> 10} K"] for x in xs],
             "lines": [{"name": "a", "points": [[x, x / 4096] for x in xs] + [[0, 5], [9, -1]]}]},
            {"title": "speed-up", "x_label": "ranks", "y_label": "times", "from_zero": True,
             "dots": True, "x_ticks": [[r, str(r)] for r in (1, 2, 4, 8)],
             "lines": [{"name": "measured", "points": [[r, 0.9 * r] for r in (1, 2, 4, 8)],
                        "labels": ["", "", "3.60x", "7.20x, 90 %"]},
                       {"name": "ideal", "reference": True,
                        "points": [[r, r] for r in (1, 2, 4, 8)]}]},
            {"title": HOSTILE[0], "x_label": "s", "y_label": HOSTILE[1], "note": HOSTILE[2],
             "lines": [{"name": name, "points": [[1, i], [2, None], [3, i], [4, i + 1]]}
                       for i, name in enumerate(HOSTILE)]},
            {"title": "shares", "x_label": "s", "parts": ["forward", "backward", HOSTILE[0]],
             "columns": [[0, 10, 0.25, 0.75, 0], [30, 40, 0.5, 0.25, 0.25], ["x"]]}]
        self.open({**state(10), "series": {}, "charts": charts})
        self.page.wait("document.querySelectorAll('#charts svg').length == 4")
        for index, ratio in ((0, 16), (1, None)):
            texts, circles = self.drawn(index)
            ticks = {t: x + w / 2 for t, x, _, w, _, anchor in texts if anchor == "middle"}
            wanted = [ticks[f"{x >> 10} K"] for x in xs] if ratio else [ticks[r] for r in "1248"]
            self.assertEqual(len(circles), 4)
            for (x, _), tick in zip(circles, wanted):
                self.assertAlmostEqual(x, tick, delta=4)
            heights = [circles[i][1] - circles[i + 1][1] for i in range(3)]
            if ratio:  # the same factor is the same distance
                self.assertAlmostEqual(heights[0], heights[1], delta=0.5)
            else:  # twice as much is twice as high
                self.assertAlmostEqual(heights[2], 2 * heights[1], delta=0.5)
        self.assertEqual(self.page.value(
            "document.querySelectorAll('#charts .chart')[2].querySelector('.curve.l0')"
            ".getAttribute('d').split('M').length"), 3, "a gap")
        self.drawn(2)
        text = self.page.value("document.querySelector('#charts').innerText")
        for part in HOSTILE[:3]:
            self.assertIn(part, text)
        path, = json.loads(self.page.value(
            "JSON.stringify(Array.from(document.querySelectorAll('#charts .chart')[3]"
            ".querySelectorAll('path.p1'), (e) => e.getAttribute('d')))"))
        (left, low, right, high), (begin, *_rest) = [
            list(map(float, re.findall(r"[\d.]+", part)))[:4] for part in path.split("M")[1:]]
        self.assertAlmostEqual(begin - left, 3 * (right - left), delta=0.5)  # from 30, and a gap
        self.assertAlmostEqual(low - high, 0.75 * 130, delta=1)
        self.assertEqual(self.page.value("document.querySelectorAll('#charts path.p9').length"), 1)
        self.check_quiet()

    def test_a_scaling_and_two_runs_have_their_own_parts(self):
        shares = {"forward": 0.3, "backward": 0.5, "data": 0.2}
        self.open(state(10))
        self.server.set({
            "run": {"id": "a.yaml", "state": "scaling", "recorded": True, "message": "One note."},
            "tiles": [["Speed-up", "1.95", "with 2 ranks"]],
            "budgets": [{"name": "1 rank", "step_ms": 10, "budget": shares},
                        {"name": "2 ranks", "step_ms": 20, "budget": shares}],
            "findings": [{**FINDING, "of": "2 ranks"}],
            "verdict": {"healthy": False, "text": "1 rank: Nothing found."},
            "tables": [{"title": "Long", "heads": ["a"], "rows": [["x"]] * 40, "notes": []}]})
        self.page.wait("document.querySelector('#state').innerText == 'scaling'")
        text = self.page.value("document.body.innerText")
        for part in ("1.95", "with 2 ranks", "One note.", "2 ranks, rank 1: data",
                     "1 rank: Nothing found.", "30 %", "20 ms", "Long"):
            self.assertIn(part, text)
        self.assertNotIn("Last collective", text)
        widths = json.loads(self.page.value("JSON.stringify(Array.from(document.querySelectorAll("
                                            "'#budget .bar'), (e) => e.clientWidth))"))
        self.assertAlmostEqual(widths[1], 2 * widths[0], delta=2)
        self.assertFalse(self.page.value("document.querySelector('#tables details').open"))
        self.check_quiet()

    def test_a_stall_shows(self):
        self.open(state(10))
        self.assertTrue(self.page.value("document.querySelector('.healthy') !== null"))
        self.assertTrue(self.page.value("document.querySelector('#stall').hidden"))
        what = "No step has ended for 12 s: rank 1 is stopped (kill -CONT 4101 continues it)."
        self.server.set(state(10, stall=what))
        self.page.wait("document.querySelector('#state').innerText == 'stalled'")
        self.assertEqual(self.page.value("document.querySelector('#banner').innerText"), what)
        self.assertIn("Nothing can be judged while no step ends.",
                      self.page.value("document.querySelector('#findings').innerText"))
        self.assertFalse(self.page.value("document.querySelector('.healthy') !== null"))
        self.assertIn("no step for 12 s",
                      self.page.value("document.querySelector('#tiles').innerText"))
        self.assertIn("T stopped", self.page.value("document.querySelector('#stall-table')"
                                                   ".innerText"))
        self.server.set(state(11))
        self.page.wait("document.querySelector('#state').innerText == 'running'")
        self.assertTrue(self.page.value("document.querySelector('#banner').hidden"))
        self.check_quiet()

    def test_the_end_of_the_run_and_a_lost_server_differ(self):
        self.open(state(10))
        self.server.set(state(44, run_state="ended"))
        time.sleep(0.1)
        self.server.close()
        self.page.wait("document.querySelector('#live').innerText.includes('run is over')")
        self.assertIn("44", self.page.value(TABLE))
        self.assertEqual(self.page.value("document.querySelector('#state').innerText"), "ended")
        self.check_quiet()
        self.server = self.serve()
        self.open(state(10))
        self.server.kill()
        self.page.wait("document.querySelector('#live').innerText.includes('connection lost')")
        self.assertIn("Rank 1", self.page.value(TABLE), "the last state stays")
        self.assertIn("Connection lost: the launcher does not answer.",
                      self.page.value("document.querySelector('#banner').innerText"))
        self.assertEqual(self.page.value("document.querySelector('#state').innerText"),
                         "was running")

    def test_text_is_never_markup(self):
        hostile = state(5, log={"0": HOSTILE, HOSTILE[0]: HOSTILE},
                        series={name: [[1, 2.0], [2, 3.0]] for name in HOSTILE},
                        findings=[{**FINDING, **{key: HOSTILE[0] for key in
                                                 ("rule", "cause", "what", "evidence", "remedy")}}])
        hostile["run"] |= {"id": HOSTILE[1], "message": HOSTILE[0], "state": HOSTILE[3]}
        for key in ("state", "phase", "exit"):
            hostile["ranks"][0][key] = HOSTILE[0]
        hostile["ranks"][0]["position"] |= {"operation": HOSTILE[3], "state": HOSTILE[0]}
        hostile["ranks"][0]["budget"] = {HOSTILE[0]: 0.5, "__proto__": 0.25, "constructor": 0.25}
        before = len(self.page.problems)
        self.open(hostile)
        self.page.wait("document.querySelectorAll('#charts svg').length == 5")
        text = self.page.value("document.body.innerText")
        for part in HOSTILE:
            self.assertIn(part, text)
        self.assertEqual(self.page.value("document.querySelectorAll('main img, main script, "
                                         "main svg svg').length"), 0)
        self.assertIsNone(self.page.value("window.hacked ?? null"))
        self.assertEqual(len(self.page.problems), before)
        self.check_quiet()

    def test_odd_states_draw_what_they_can(self):
        self.open(state(3))
        for odd in ({}, {"run": None, "ranks": None, "series": None, "log": None},
                    {"run": {"state": 7}, "ranks": [None, 3, {}],
                     "series": {"loss": [[1, None], 4]}, "log": {"0": None}, "findings": [{}],
                     "time": "now", "tables": [None, {}, {"rows": [None, [1]], "notes": 3}]},
                    state(4, series={"loss": [[1, 0.0]], "flat": [[1, 2], [2, 2]],
                                     "nan": [[1, "nan"]]})):
            self.server.set(odd)
            time.sleep(0.5)
        self.page.wait(f"{TABLE}.includes('4')")
        self.check_quiet()

    def test_usable_by_keyboard_and_named_for_screen_readers(self):
        self.open(state(10, ranks=3))
        reached = []
        for _ in range(6):
            self.page.press("Tab")
            reached.append(self.page.value("document.activeElement.id || "
                                           "document.activeElement.className"))
        self.assertEqual(reached[0], "skip")
        self.assertIn("log-rank", reached)
        self.assertIn("log", reached)
        self.page.value("document.querySelector('#log-rank').focus()")
        self.page.press("ArrowDown")
        self.page.wait("document.querySelector('#log-rank').value == '1'")
        nodes = self.page.call("Accessibility.getFullAXTree")["nodes"]
        unnamed = [n for n in nodes if not n.get("ignored") and
                   n.get("role", {}).get("value") in ("img", "image", "combobox", "region", "link",
                                                      "table", "log") and
                   not n.get("name", {}).get("value") and
                   n.get("role", {}).get("value") != "table"]
        self.assertEqual(unnamed, [])
        self.check_quiet()

    def test_fits_a_phone_and_follows_the_colour_scheme(self):
        self.page.look(width=360, height=740, mobile=True)
        self.open(state(20, gpus=True, findings=[FINDING]))
        self.assertLessEqual(self.page.value("document.documentElement.scrollWidth"), 360)
        colour = "getComputedStyle(document.body).backgroundColor"
        light = self.page.value(colour)
        self.page.look(scheme="dark")
        self.assertNotEqual(self.page.value(colour), light)
        self.check_quiet()

    def test_many_ranks(self):
        self.open(state(20, ranks=64))
        self.assertEqual(self.page.value("document.querySelectorAll('#ranks tr').length"), 64)
        self.check_quiet()

    def test_a_page_of_another_site_reads_nothing(self):
        """A page at another origin, in the browser that has the cookie."""
        self.open(state(10))
        other = self.serve()
        other_page = other.url.replace("127.0.0.1", "localhost")
        self.page.open(other_page)
        self.page.wait("document.querySelectorAll('#ranks tr').length > 0")
        # Its own policy would stop it already; a fetch from here shows what the server sends.
        answer = self.page.value(f"fetch('http://127.0.0.1:{self.server.port}/snapshot')"
                                 ".then(() => 'read', () => 'refused')")
        self.assertEqual(answer, "refused")


def screenshots(folder):
    """What a person should look at after a change of the page."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    server = Server()
    page = browser.Browser(PROGRAM)
    looks = {"light": {}, "dark": {"scheme": "dark"},
             "phone": {"width": 390, "height": 844, "mobile": True, "scale": 2},
             "phone_dark": {"width": 390, "height": 844, "mobile": True, "scheme": "dark"}}
    runs = {"": state(240, ranks=4, gpus=True, findings=[FINDING]),
            "_failed": state(240, failed=1), "_cpu": state(240)}
    try:
        for suffix, run in runs.items():
            server.set(run)
            time.sleep(0.5)
            for name, look in looks.items():
                page.look(**look)
                page.open(server.url)
                page.wait("document.querySelectorAll('#ranks tr').length > 0")
                page.value("new Promise(done => setTimeout(done, 300))")
                page.screenshot(folder / f"{name}{suffix}.png")
        server.set(state(240, gpus=True, findings=[FINDING]))
        page.look(width=1140, height=878)
        page.open(server.url)
        page.wait("document.querySelectorAll('#ranks tr').length == 2")
        page.value("new Promise(done => setTimeout(done, 300))")
        page.screenshot(folder / "dashboard.png", whole=False)
        server.kill()
        page.wait("document.querySelector('#live').innerText.includes('connection lost')")
        page.screenshot(folder / "lost.png")
    finally:
        page.close()
        if server.process.poll() is None:
            server.kill()


if __name__ == "__main__":
    if "--screenshots" in sys.argv:
        screenshots(sys.argv[sys.argv.index("--screenshots") + 1])
        sys.exit(0)
    if PROGRAM is None:
        print("SKIP the page in a browser: no Chromium is here (Debian's package "
              "chromium-headless-shell; ./dev test --all installs it)")
        sys.exit(77)
    unittest.main()

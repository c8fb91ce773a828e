"""The benchmarks on tiny sizes: their help, what they write and refuse, and what they exit with."""

import os
import re
import subprocess
import sys
import unittest

from bench_case_for_test import Case, bench

GOALS = os.path.join(os.environ["LOCKSTEP_SOURCE"], "bench", "goals.py")
ALLREDUCE = ["allreduce", "--backends", "shm,gloo", "--sizes", "4K,1M", "--rounds", "1",
             "--budget-s", "2"]
STEP = ["step", "--params", "150K", "--rounds", "3", "--seconds", "1"]
TRAIN = ["train", "--layers", "1", "--width", "32", "--vocab", "64", "--tokens", "16",
         "--batches", "1,2", "--steps", "2", "--rounds", "3", "--seconds", "1"]


class AllReduce(Case):
    def test_measures_what_it_verified(self):
        result, rows, document = self.passes(*ALLREDUCE)
        title, *columns = rows[0]
        self.assertEqual(title, "all-reduce, 2 ranks")
        for column in ("size", "min us", "p50 us", "p99 us", "max us", "GB/s", "gloo / this",
                       "% of memory"):
            self.assertIn(column, columns)
        contenders = ["gloo", "shm private", "shm symmetric"]
        limits = ["limit: memcpy", "limit: plain loop"]
        self.assertEqual(sorted((row[title], row["size"]) for row in rows),
                         sorted([(name, size) for name in contenders for size in ("1 MB", "4 KB")] +
                                [(name, "1 MB") for name in limits]))
        figures = {(row["contender"], row["bytes"]): row for row in document["rows"]}
        self.assertEqual((document["benchmark"], document["ranks"]), ("allreduce", 2))
        for row in rows:
            size = {"4 KB": 4096, "1 MB": 1 << 20}[row["size"]]
            figure = figures[row[title], size]
            self.assertGreater(figure["samples"], 0)
            order = [figure[key] for key in ("min_us", "p50_us", "p99_us", "max_us")]
            self.assertEqual(order, sorted(order))
            self.assertGreater(order[0], 0)
            self.assertAlmostEqual(float(row["p50 us"]), figure["p50_us"], delta=0.06)
            # Bandwidth and ratio are those of the medians.
            self.assertAlmostEqual(float(row["GB/s"]), size / figure["p50_us"] / 1e3, delta=0.006)
            ratio = figures["gloo", size]["p50_us"] / figure["p50_us"]
            self.assertAlmostEqual(float(row["gloo / this"].rstrip("x")), ratio, delta=0.06)
        # The limit is the faster of two loops that share nothing with the engine.
        fastest = min(figures[name, 1 << 20]["p50_us"] for name in limits)
        for name in contenders:
            figure = figures[name, 1 << 20]
            self.assertAlmostEqual(figure["percent_of_memory"], 100 * fastest / figure["p50_us"])

    def test_refuses_a_wrong_contender(self):
        for contender in "gloo", "shm private", "shm symmetric", "limit: memcpy":
            with self.subTest(contender):
                result = bench(*ALLREDUCE, "--corrupt", contender)
                self.assertNotEqual(result.returncode, 0)
                count = 1 << 18 if contender.startswith("limit") else 1024
                self.assertIn(f"{contender}: element {count - 1} of {count} is ", result.stderr)
                self.assertNotIn("p50", result.stdout)

    def test_continues_without_open_mpi(self):
        # A compiler that fails stands for Open MPI that is not there.
        compiler = self.folder / "mpicc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
        result = bench("allreduce", "--backends", "shm,mpi", "--sizes", "4K", "--rounds", "1",
                       "--budget-s", "1", PATH=f"{self.folder}:{os.environ['PATH']}")
        self.assertIn("no Open MPI here (mpicc failed); continuing without it", result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_three_ranks_of_one_backend(self):
        _, rows, document = self.passes("allreduce", "--ranks", "3", "--backends", "shm", "--sizes",
                                        "1000", "--rounds", "2", "--budget-s", "1")
        self.assertEqual({row["size"] for row in rows}, {"1000 B"})
        self.assertEqual({row["gloo / this"] for row in rows}, {""})
        self.assertEqual(document["ranks"], 3)

    def test_refuses_nonsense(self):
        self.fails(2, "'12Q' is not a size", "allreduce", "--sizes", "12Q")
        self.fails(2, "'foo' is none of shm, gloo and mpi", "allreduce", "--backends", "shm,foo")
        self.assertNotEqual(bench("allreduce", "--ranks", "1").returncode, 0)


class Step(Case):
    def test_measures_what_it_verified(self):
        for extra, exact in ([], "bit for bit"), (["--clip"], "within rounding"):
            with self.subTest(extra):
                result, rows, document = self.passes(*STEP, *extra)
                self.assertIn("verified: fused (bit for bit)", result.stderr)
                self.assertIn("verified: replicated (bit for bit)", result.stderr)
                self.assertIn(f"verified: gloo ({exact})", result.stderr)
                self.assertEqual(list(rows[0])[1:], ["rounds", "min ms", "p50 ms", "p99 ms",
                                                     "max ms", "times fused", "p25", "p75"])
                keys = ["alone", "fused", "gloo", "replicated"]
                limits = [] if extra else ["arithmetic", "memory"]
                self.assertEqual(len(rows), len(keys + limits))
                self.assertEqual(rows[0]["times fused"], "1.000")
                by_key = {row["contender"]: row for row in document["rows"]}
                self.assertEqual(sorted(by_key), sorted(keys + limits))
                if limits:
                    self.assertAlmostEqual(document["percent_of_limit"], 100 * max(
                        by_key[name]["times_fused"] for name in limits))
                self.assertEqual({len(row["ms"]) for row in by_key.values()}, {3})
                self.assertEqual((document["ranks"], document["parameters"], document["clip"]),
                                 (2, 150_000, bool(extra)))
                self.assertAlmostEqual(float(rows[0]["p50 ms"]), by_key["fused"]["p50_ms"],
                                       delta=0.006)

    def test_gloo_of_three_ranks_is_right_within_rounding(self):
        result, _, _ = self.passes(*STEP, "--ranks", "3")
        self.assertIn("verified: replicated (bit for bit)", result.stderr)
        self.assertIn("verified: gloo (within rounding)", result.stderr)

    def test_refuses_a_wrong_contender(self):
        cases = [("fused",), ("replicated",), ("gloo",), ("alone",), ("gloo", "--clip")]
        for contender, *extra in cases:
            with self.subTest(contender, extra=extra):
                result = self.fails(1, f"{contender} is wrong: ", *STEP, *extra, "--corrupt",
                                    contender)
                self.assertNotIn("round 1", result.stderr)

    def test_refuses_nonsense(self):
        self.fails(2, "'32X' is not a number of parameters", "step", "--params", "32X")


class Train(Case):
    def test_measures_what_it_verified(self):
        result, rows, document = self.passes(*TRAIN, "--met", "--cached")
        self.assertIn("verified: ours and alone train the same", result.stderr)
        self.assertIn("verified: ours and cached train the same", result.stderr)
        self.assertIn("verified: ours and met train the same", result.stderr)
        self.assertIn("verified: ours and python train the same", result.stderr)
        self.assertEqual(list(rows[0])[1:], ["batch", "blocks", "min ms", "p50 ms", "p99 ms",
                                             "max ms", "samples/s", "ours / this", "p25", "p75"])
        self.assertEqual(len(rows), 10)
        self.assertEqual(sorted({(r["contender"], r["batch"]) for r in document["rows"]}),
                         [(name, batch) for name in ("alone", "cached", "met", "ours", "python")
                          for batch in (1, 2)])
        self.assertTrue(all(len(row["samples_per_s"]) == 3 for row in document["rows"]))

    def test_refuses_a_contender_that_trains_differently(self):
        # One rank of Python's is enough: its start takes seconds.
        for contender, extra in ("alone", ["--no-python"]), ("python", ["--ranks", "1"]):
            with self.subTest(contender):
                result = self.fails(1, "do not train the same", *TRAIN, *extra, "--corrupt",
                                    contender)
                self.assertNotIn("round 1", result.stderr)

    def test_refuses_nonsense(self):
        self.fails(2, "is not a multiple of 4", "train", "--width", "30")
        self.fails(2, "Drop --no-python", *TRAIN, "--no-python", "--corrupt", "python")


class Others(Case):
    def test_the_quick_ones_verify_and_write(self):
        for arguments, rows in (
                (("kernels", "--small", "--device", "cpu", "--rows", "64", "--rounds", "1"), 12),
                (("loader", "--batches", "4", "--no-python"), 5),
                (("launch", "--ranks", "2", "--rounds", "1"), 3)):
            with self.subTest(arguments[0]):
                _, table, document = self.passes(*arguments)
                self.assertEqual((len(table), len(document["rows"])), (rows, rows))
                self.assertEqual(document["benchmark"], arguments[0])

    def test_goals_are_compared_with_a_table(self):
        table = self.folder / "goals.txt"
        table.write_text("# a comment\nmany: loader --batches 9\n  rows <= 1\n\n"
                         "few: loader --batches 4 --no-python\n  wait_percent <= 100\n"
                         "  contender=load | p50 >= %s\n  contender=nothing | p50 >= 0\n")

        def judge(text, name="few"):
            table.write_text(text)
            return subprocess.run([sys.executable, GOALS, name, table], capture_output=True,
                                  text=True, timeout=120)

        text = table.read_text()
        done = judge(text % 0)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stdout, r"wait_percent <= 100: \S+ reached\n"
                                      r"contender=load \| p50 >= 0: \S+ reached\n"
                                      r"contender=nothing \| p50 >= 0: None MISSED\n$")
        reached = "".join(text.splitlines(True)[:-1])
        self.assertEqual(judge(reached % 0).returncode, 0)
        self.assertIn("p50 >= 1e9: ", judge(reached % "1e9").stdout)
        self.assertEqual(judge(reached % "1e9").returncode, 1)
        self.assertIn("no goals of that name: none", judge(reached % 0, "none").stderr)
        self.assertEqual(judge("few: loader --batchez 4\n  rows <= 1\n").returncode, 2)


# Options that have a default to show; paths have none.
DEFAULTS = {
    "launch": ("--ranks", "--rounds"),
    "allreduce": ("--ranks", "--rounds", "--backends", "--sizes"),
    "kernels": ("--device", "--rows", "--rounds"),
    "recipes": ("--accumulation", "--updates", "--rounds", "--peer-modes"),
    "scale": ("--ranks", "--steps", "--rounds", "--threads", "--output"),
    "dp-vs-ddp": ("--ranks", "--steps", "--batch_size", "--model", "--image_size", "--device"),
    "presets": ("--ranks", "--steps", "--rounds", "--threads"),
    "ablation": ("--ranks", "--steps", "--rounds", "--workers", "--threads"),
}
TAKES_A_FILE = {"presets", "ablation", "recipes"}


def entries(text):
    """{flag: (left column, meaning)} of a help text; long left columns have a line of their own."""
    found, flag = {}, None
    for line in text.splitlines():
        match = re.match(r"  (?:-\w,)?(--[\w-]+)(.*)", line)
        if match:
            flag = match.group(1)
            found[flag] = match.group(2)
        elif flag and line.startswith("   "):
            found[flag] += " " + line.strip()
    return found


class Arguments(unittest.TestCase):
    def test_help_explains_every_option_with_its_default(self):
        for name, defaults in DEFAULTS.items():
            done = bench(name, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"Usage: lockstep bench {name} [OPTIONS]", done.stdout)
            found = entries(done.stdout)
            self.assertGreater(len(found), 3)
            for flag in defaults:
                # "--ranks INT:INT in [1 - 64]=4" or "... [4]", by the version of CLI11.
                shown = re.sub(r"in \[[^]]*\]", "", found[flag])
                self.assertRegex(shown, r"[=\[][\w.,-]+(\]|\s)", done.stdout)
            for flag, text in found.items():
                tokens = re.sub(r"[A-Z]+(:\S+)?|\[.*?\]|\([^)]*\)", " ", text, count=1).split()
                self.assertGreaterEqual(len([t for t in tokens if t.isalpha() and t.islower()]), 2,
                                        f"{name} {flag} is not explained:{text}")

    def test_dp_vs_ddp_measures_a_hundred_steps_of_sixty_four_samples(self):
        found = entries(bench("dp-vs-ddp", "--help").stdout)
        for flag, default in (("--steps", 100), ("--batch_size", 64)):
            self.assertRegex(found[flag], rf"[=\[]{default}\b")

    def test_a_mistake_is_reported_in_one_line_with_exit_code_two(self):
        for name in DEFAULTS:
            for arguments, part in ((["--rankz", "3"], "--rankz"), (["--csv"], "--csv"),
                                    (["elephant"], "elephant")):
                if arguments == ["elephant"] and name in TAKES_A_FILE:
                    continue
                done = bench(name, *arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertTrue(done.stderr.startswith(f"lockstep bench {name}: "), done.stderr)
                self.assertIn(part, done.stderr)
        self.assertIn("there is no option --step (did you mean --steps?).",
                      bench("dp-vs-ddp", "--step", "20").stderr)
        done = bench("presets", "--ranks", "1")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--ranks", done.stderr)
        self.assertEqual(bench("elephant").returncode, 2)

    def test_an_invalid_value_is_reported_clearly(self):
        cases = [(("kernels", "--device", "foo"), "--device: 'foo' is not a device; use cpu,"),
                 (("loader", "--device", "cuda:x"), "--device: 'cuda:x' is not a device"),
                 (("step", "--seconds", "nan"), "--seconds: 'nan' is not a number above zero")]
        # Where there are fewer GPUs than that, as on any machine.
        cases += [((name, "--device", "cuda:999"), "--device cuda:999: ")
                  for name in ("kernels", "loader")]
        for arguments, part in cases:
            with self.subTest(arguments):
                done = bench(*arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()

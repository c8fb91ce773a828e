"""The benchmarks on tiny sizes: what they write, what they refuse, and what they exit with."""

import json
import os
import re
import unittest

from bench_case_for_test import Case, bench

ALLREDUCE = ["allreduce", "--backends", "shm,gloo", "--sizes", "4K,1M", "--rounds", "1",
             "--budget-s", "2"]
STEP = ["step", "--params", "150K", "--rounds", "3", "--seconds", "1"]
TRAIN = ["train", "--layers", "1", "--width", "32", "--vocab", "64", "--tokens", "16",
         "--batches", "1,2", "--steps", "2", "--rounds", "3", "--seconds", "1"]


class AllReduce(Case):
    def test_measures_what_it_verified(self):
        page = self.folder / "a.html"
        result, rows, document = self.passes(*ALLREDUCE, "--page", str(page))
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
        data, = re.findall(r'id="data">(.*?)</script>', page.read_text())
        time, rate = json.loads(data)["charts"]
        self.assertEqual((time["y_label"], rate["y_label"]), ("microseconds", "GB/s"))
        for line in time["lines"]:
            for size, us in line["points"]:
                self.assertAlmostEqual(us, figures[line["name"], size]["p50_us"], delta=0.06)
        self.assertEqual(sorted(line["name"] for line in rate["lines"]),
                         sorted(contenders + limits))

    def test_refuses_a_wrong_contender(self):
        for contender in "gloo", "shm private", "shm symmetric", "limit: memcpy":
            with self.subTest(contender):
                result = bench(*ALLREDUCE, "--corrupt", contender)
                self.assertNotEqual(result.returncode, 0)
                count = 1 << 18 if contender.startswith("limit") else 1024
                self.assertIn(f"{contender}: element {count - 1} of {count} is ", result.stderr)
                self.assertNotIn("p50", result.stdout)

    def test_refuses_arguments_before_it_measures(self):
        for arguments, text in ((("--backends", "shm,foo"), "'foo' is none of shm, gloo and mpi"),
                            (("--require", "private:4K:mpi:1"), "is not among --backends"),
                            (("--require", "private:7K:us:1"), "is not among --backends"),
                            (("--require", "other:4K:us:1"), "write private or symmetric")):
            with self.subTest(arguments):
                result = bench("allreduce", *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(text, result.stderr)
                self.assertNotIn("round", result.stderr)

    def test_refuses_a_goal_that_cannot_be_measured(self):
        # A compiler that fails stands for Open MPI that is not there: before anything is measured.
        compiler = self.folder / "mpicc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
        result = bench("allreduce", "--backends", "shm,mpi", "--sizes", "4K", "--require",
                       "private:4K:mpi:1", PATH=f"{self.folder}:{os.environ['PATH']}")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("--require 'private:4K:mpi:1': there is no Open MPI here", result.stderr)
        self.assertNotIn("round", result.stderr)
        # Without such a goal it is skipped.
        result = bench("allreduce", "--backends", "shm,mpi", "--sizes", "4K", "--rounds", "1",
                       "--budget-s", "1", PATH=f"{self.folder}:{os.environ['PATH']}")
        self.assertIn("no Open MPI here (mpicc failed); continuing without it", result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        result = bench("allreduce", "--sizes", "4K", "--require", "symmetric:4K:memory:1")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("--require 'symmetric:4K:memory:1': the memory's limit is measured from 1 MB",
                      result.stderr)
        self.assertNotIn("round", result.stderr)

    def test_three_ranks_of_one_backend(self):
        _, rows, document = self.passes("allreduce", "--ranks", "3", "--backends", "shm", "--sizes",
                                        "1000", "--rounds", "2", "--budget-s", "1")
        self.assertEqual({row["size"] for row in rows}, {"1000 B"})
        self.assertEqual({row["gloo / this"] for row in rows}, {""})
        self.assertEqual(document["ranks"], 3)

    def test_refuses_nonsense(self):
        self.fails(2, "'12Q' is not a size", "allreduce", "--sizes", "12Q")
        self.assertNotEqual(bench("allreduce", "--ranks", "1").returncode, 0)


class Step(Case):
    def test_measures_what_it_verified(self):
        for extra, exact in ([], "bit for bit"), (["--clip"], "within rounding"):
            with self.subTest(extra):
                result, rows, document = self.passes(*STEP, *extra, "--require-gloo", "0.0001",
                                                     "--require-alone", "10000")
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

    def test_fails_when_a_goal_is_missed(self):
        result = self.fails(1, "at most 1e-05 required: MISSED", *STEP, "--require-gloo", "100000",
                            "--require-replicated", "200000", "--require-alone", "0.00001",
                            "--require-limit", "300000")
        self.assertIn("at least 100000 required: MISSED", result.stderr)
        self.assertIn("at least 200000 required: MISSED", result.stderr)
        self.assertIn("at least 300000 required: MISSED", result.stderr)

    def test_refuses_nonsense(self):
        self.fails(2, "'32X' is not a number of parameters", "step", "--params", "32X")
        self.fails(2, "the limit is that of one pass", "step", "--clip", "--require-limit", "50")


class Train(Case):
    def test_measures_what_it_verified(self):
        result, rows, document = self.passes(*TRAIN, "--met", "--cached",
                                             "--require-alone", "1:0.0001",
                                             "--require-python", "2:0.0001")
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
        self.assertIn("ours / alone at batch 1 is ", result.stderr)
        self.assertIn("ours / python at batch 2 is ", result.stderr)

    def test_refuses_a_contender_that_trains_differently(self):
        # One rank of Python's is enough: its start takes seconds.
        for contender, extra in ("alone", ["--no-python"]), ("python", ["--ranks", "1"]):
            with self.subTest(contender):
                result = self.fails(1, "do not train the same", *TRAIN, *extra, "--corrupt",
                                    contender)
                self.assertNotIn("round 1", result.stderr)

    def test_fails_when_a_goal_is_missed(self):
        self.fails(1, "at least 1000 required: MISSED", *TRAIN, "--no-python", "--require-alone",
                   "2:1000")

    def test_refuses_nonsense(self):
        self.fails(2, "is not BATCH:RATIO", *TRAIN, "--require-alone", "fast")
        self.fails(2, "batch 4 is required but not measured", *TRAIN, "--require-alone", "4:1")
        self.fails(2, "is not a multiple of 4", "train", "--width", "30")
        self.fails(2, "Drop --no-python", *TRAIN, "--no-python", "--require-python", "1:1")


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


if __name__ == "__main__":
    unittest.main()

"""Real runs of two ranks with something wrong in them, and what `lockstep doctor --run` finds.

Each cause is planted alone; the rule must be found, and the same run without it must not have it.
A clean run has no findings at all: 12 s of it, and 5 minutes with LOCKSTEP_SOAK=1.
"""

import json
import os
import pathlib
import re
import resource
import subprocess
import tempfile
import time
import unittest

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
LOCKSTEP = str(BIN / "lockstep")
PEER = str(BIN / "tests" / "planted_peer")
FAKE_NVML = BIN.parent / "lib" / "fake_nvml_new" / "libnvidia-ml.so.1"
SOAK = os.environ.get("LOCKSTEP_SOAK") == "1"
BOUND_S = 240  # for what takes seconds, on a machine that is busy

# Steps of some 20 ms, nearly all of them forward and backward.
CLEAN = {"PLANT_HIDDEN": "640"}
KEYS = {"per_device_train_batch_size": 64, "logging_steps": 10, "save_strategy": "no",
        "disable_tqdm": "true", "use_cpu": "true", "dataloader_num_workers": 0, "optim": "adamw"}
SMALL = {"per_device_train_batch_size": 16}  # steps of a millisecond or two

BUSY_CORES = 0.15  # of the two: other programs have so much that the ranks may miss it


def environment(**more):
    ours = r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|LOCKSTEP_(?!BIN|SOURCE|PYTHON)"
    env = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**env, "LOCKSTEP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **more}


def two_cores():
    """Before a run begins: as many cores as it has ranks, wherever the test runs."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))


def busy_s(cores):
    """CPU time that all programs have used on these cores; 0 where the kernel does not say."""
    used = 0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{core}" for core in cores}:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            used += user + nice + system + irq + softirq + steal
    return used / os.sysconf("SC_CLK_TCK")


class OtherPrograms:
    """How many of the cores that runs use other programs had meanwhile."""

    def __enter__(self):
        self.cores_used = sorted(os.sched_getaffinity(0))[:2]
        self.before = self.now()
        return self

    def __exit__(self, *_):
        wall, busy, own = (b - a for a, b in zip(self.before, self.now()))
        self.cores = (busy - own) / wall

    def now(self):
        ours = [resource.getrusage(who)
                for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return (time.monotonic(), busy_s(self.cores_used),
                sum(usage.ru_utime + usage.ru_stime for usage in ours))


class PlantedCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep-planted-")
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        self.runs = 0

    def run_ranks(self, arguments, variables, bound_s=BOUND_S):
        done = subprocess.run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", *arguments],
                              capture_output=True, text=True, timeout=bound_s, check=False,
                              env=environment(**variables), stdin=subprocess.DEVNULL,
                              preexec_fn=two_cores)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def train(self, steps, keys=None, bound_s=BOUND_S, **variables):
        """Its output_dir."""
        self.runs += 1
        output = self.place / f"run_{self.runs}"
        flags = {**KEYS, **(keys or {}), "max_steps": steps, "output_dir": output}
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        self.run_ranks([PEER, "train", *words], {**CLEAN, **variables}, bound_s)
        return output

    def doctor(self, folder, *flags):
        done = subprocess.run([LOCKSTEP, "doctor", "--run", str(folder), *flags],
                              capture_output=True, text=True, timeout=BOUND_S, check=False)
        self.assertIn(done.returncode, (0, 1), done.stdout + done.stderr)
        return done

    def report(self, folder):
        done = self.doctor(folder, "--json")
        report = json.loads(done.stdout)
        self.assertEqual(done.returncode, 1 if report["findings"] else 0)
        return report

    def finding(self, folder, rule):
        """That rule's, with the report for whoever reads a failure."""
        report = self.report(folder)
        found = [finding for finding in report["findings"] if finding["rule"] == rule]
        self.assertEqual(len(found), 1, json.dumps(report, indent=1))
        for key in ("what", "evidence", "remedy"):
            self.assertTrue(found[0][key], found[0])
        self.assertGreaterEqual(found[0]["gain"], 0)
        self.assertLess(found[0]["gain"], 1)
        return found[0]

    def assert_without(self, folder, *rules):
        report = self.report(folder)
        found = [finding for finding in report["findings"] if finding["rule"] in rules]
        self.assertEqual(found, [], json.dumps(report, indent=1))


class Ranks(PlantedCase):
    def test_a_loader_that_sleeps_on_one_rank(self):
        finding = self.finding(self.train(20, SMALL, PLANT_HIDDEN="64", PLANT_SLEEP="1:20"),
                               "straggler")
        self.assertEqual((finding["rank"], finding["cause"]), (1, "data"), finding)

    def test_a_rank_with_a_tenth_of_a_core(self):
        # Other programs may have most of the other rank's core: the doctor names a straggler only
        # where it waits for a core three times as long as the others. Steps compute for much longer
        # than they communicate, or the rank would lack its core within the all-reduce.
        keys = {"per_device_train_batch_size": 512}
        give_up = time.monotonic() + BOUND_S
        while True:
            with OtherPrograms() as others:
                folder = self.train(25, keys, PLANT_STARVE="1", PLANT_HIDDEN="256")
            found = any(f["rule"] == "straggler" for f in self.report(folder)["findings"])
            if found or others.cores < BUSY_CORES:
                break
            # Where others leave every rank as little as the starved one has, nobody can tell.
            if time.monotonic() > give_up:
                self.skipTest(f"SKIPPED: other programs had {others.cores:.2f} of two cores for "
                              f"{BOUND_S} s")
        finding = self.finding(folder, "straggler")
        self.assertEqual((finding["rank"], finding["cause"]), (1, "cpu-starved"), finding)

    def test_a_loader_that_is_slow_everywhere(self):
        keys = {**SMALL, "dataloader_num_workers": 1}
        slow = self.train(60, keys, PLANT_HIDDEN="64", PLANT_SLEEP="all:60")
        finding = self.finding(slow, "loader-bound")
        self.assertRegex(finding["remedy"], r"dataloader_num_workers to \d+ \(now 1\)")


class Habits(PlantedCase):
    def test_searching_for_unused_parameters(self):
        keys = {"shard_optimizer": "false"}
        self.finding(self.train(30, {**keys, "ddp_find_unused_parameters": "true"}),
                     "find-unused-parameters")
        self.assert_without(self.train(30, keys), "find-unused-parameters")

    def test_logging_in_every_step(self):
        often = self.train(60, {"logging_steps": 1}, PLANT_LOG="10")
        finding = self.finding(often, "logging-too-often")
        self.assertRegex(finding["remedy"], r"logging_steps to \d+")
        self.assertRegex(finding["evidence"], r"every 1\.0 steps; [1-9]\d*\.\d waits of the host")
        self.assert_without(self.train(200, {"logging_steps": 100}, PLANT_LOG="10"),
                            "logging-too-often")

    def test_saving_too_often(self):
        keys = {"save_strategy": "steps", "save_total_limit": 1}
        finding = self.finding(self.train(60, {**keys, "save_steps": 2}), "saving-too-often")
        self.assertRegex(finding["remedy"], r"save_steps to \d+")
        self.assert_without(self.train(60, {**keys, "save_steps": 50}), "saving-too-often")

    def test_averaging_in_every_micro_step(self):
        for passes in (4, 1):
            folder = self.place / f"loop_{passes}"
            self.run_ranks([PEER, "loop", str(folder), "40", str(passes)], CLEAN)
            if passes == 4:
                finding = self.finding(folder, "accumulation-synchronises")
                self.assertRegex(finding["evidence"], r"(3\.9|4\.[01]) synchronised backward ")
            else:
                self.assert_without(folder, "accumulation-synchronises")


class Resources(PlantedCase):
    def test_more_threads_than_cores(self):
        # So many that some of them always wait, also where a thread that other programs have
        # interrupted keeps the others asleep at the end of an operator.
        finding = self.finding(self.train(100, PLANT_THREADS="8"), "too-many-threads")
        self.assertIn("OMP_NUM_THREADS=1", finding["remedy"])
        self.assertIn("2 ranks with 8 threads each on 2 cores", finding["evidence"])

    def test_other_programs_on_the_cores_of_all_ranks(self):
        hogs = [subprocess.Popen(["sh", "-c", "while :; do :; done"], preexec_fn=two_cores)
                for _ in range(4)]
        try:
            folder = self.train(200)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        finding = self.finding(folder, "cpu-starved")
        self.assertEqual((finding["rank"], finding["cause"]), (-1, "other-programs"), finding)
        self.assertRegex(finding["evidence"], r"the ranks had [01]\.\d of 2 cores")

    def test_memory_that_goes_back_in_every_step(self):
        # Activations of 256 KiB: each is mapped and unmapped where malloc is set to. Narrow layers,
        # so that a processor that multiplies slowly does not hide it.
        keys = {"per_device_train_batch_size": 512}
        small = {"PLANT_HIDDEN": "128"}
        finding = self.finding(
            self.train(400, keys, LOCKSTEP_CPU_CACHE_MAX_BYTES="0", MALLOC_TRIM_THRESHOLD_="0",
                       MALLOC_MMAP_THRESHOLD_="65536", **small), "page-faults")
        self.assertIn("MALLOC_TRIM_THRESHOLD_", finding["remedy"])
        self.assert_without(self.train(400, keys, **small), "page-faults")


class Gpus(PlantedCase):
    def sampled(self, utilisation):
        script = self.place / "script"
        script.write_text("devices 2\n" + "".join(
            f"{gpu} name Fake H200\n{gpu} utilisation {values}\n{gpu} used {60 << 30}\n"
            f"{gpu} total {140 << 30}\n{gpu} power 600000\n"
            for gpu, values in enumerate(utilisation)))
        folder = self.place / "gpus"
        done = subprocess.run([PEER, "gpus", str(folder), "22"], capture_output=True, text=True,
                              timeout=BOUND_S, check=False, stdin=subprocess.DEVNULL,
                              env=environment(LOCKSTEP_NVML=str(FAKE_NVML),
                                              FAKE_NVML_SCRIPT=str(script)))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        report = self.report(folder)
        self.assertLessEqual(report["hosts"][0]["samples"], 30)
        return folder

    def test_gpus_that_take_turns(self):
        folder = self.sampled(["100 0", "0 100"])
        finding = self.finding(folder, "not-launched")
        self.assertEqual(finding["cause"], "alternating")
        self.assertIn("lockstep run --standalone --nproc-per-node=2 ./train --batch_size 16",
                      finding["remedy"])
        self.assertRegex(self.doctor(folder).stdout,
                         r"all GPUs busy at once in 0 % of \d+ samples\n")

    def test_gpus_that_work_together(self):
        folder = self.sampled(["92", "91"])
        self.assertEqual(self.report(folder)["findings"], [])
        text = self.doctor(folder).stdout
        self.assertRegex(text, r"GPU 0: 92 % busy, 60 GiB of memory, 600 W\n")
        self.assertRegex(text, r"all GPUs busy at once in 100 % of \d+ samples\n")


class Clean(PlantedCase):
    def test_a_clean_run_has_no_findings(self):
        wanted_s = 300 if SOAK else 12
        probe = self.report(self.train(40))
        step_s = max(rank["step_s"] for rank in probe["ranks"])
        with OtherPrograms() as others:
            folder = self.train(max(100, int(wanted_s / step_s)), bound_s=BOUND_S + 5 * wanted_s)
        report = self.report(folder)
        # This one alone is about the machine, and true where others had a part of the cores.
        found = [finding for finding in report["findings"]
                 if finding["rule"] != "cpu-starved" or others.cores < BUSY_CORES]
        self.assertEqual(found, [], f"other programs had {others.cores:.2f} cores\n"
                         + json.dumps(report, indent=1))
        self.assertEqual(report["healthy"], not report["findings"])
        text = self.doctor(folder).stdout
        self.assertIn("healthy: " if report["healthy"] else "cpu-starved", text)
        self.assertEqual(len(re.findall(r"^ +[01] +\d+ +\d+\.\d\d ", text, re.MULTILINE)), 2, text)
        for rank in report["ranks"]:
            self.assertAlmostEqual(sum(rank["shares"].values()), 1, delta=0.02)


if __name__ == "__main__":
    unittest.main()

"""`lockstep doctor --run DIR` as a user sees it, on records written by hand."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
FACTS = {"world_size": 2, "ranks_on_host": 2, "device": "cpu", "backend": "shm",
         "optimizer": "sharded fused adamw", "program": "trainer", "cores": 8}
HEALTHY = {"data": 0.02, "forward": 0.3, "backward": 0.55, "communication": 0.05,
           "optimizer": 0.08}
WAITING = {"data": 0.4, "forward": 0.2, "backward": 0.3, "communication": 0.05, "optimizer": 0.05}


class DoctorRun(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep_doctor_run_")
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)

    def record(self, phases, steps=50):
        folder = self.root / "monitor"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(FACTS))
        for rank in (0, 1):
            lines = [{"unix_time_s": 1e9 + i, "seconds": 1.0, "step": steps * i, "steps": steps,
                      "host_s": phases, "resident_bytes": 1 << 30,
                      "counts": {"batches": steps, "load_ns": steps * 40000000},
                      "process": {"seconds": 1.0, "cores": 0.5}} for i in range(10)]
            (folder / f"rank_{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    def record_hosts(self, clocks, facts=None, slow=None, started=1e9, ranks=None, earlier=()):
        """Two ranks on each host, which differ in their clocks by so many seconds. The rank `slow`
        computes 60 % longer than the others, which wait for it."""
        folder = self.root / "monitor"
        folder.mkdir(exist_ok=True)
        size = 2 * len(clocks)
        known = dict(FACTS, world_size=size, hosts=len(clocks), started_unix_s=started)
        (folder / "run.json").write_text(json.dumps(known | (facts or {})))
        for rank in range(size) if ranks is None else ranks:
            busy = {"data": 0.02, "forward": 0.31, "backward": 0.62, "communication": 0.03,
                    "optimizer": 0.02}
            waits = {"data": 0.02, "forward": 0.19, "backward": 0.38, "communication": 0.39,
                     "optimizer": 0.02}
            phases = busy if rank == slow else waits if slow is not None else HEALTHY
            clock = clocks[rank // 2]
            lines = []
            for begin, step in (*earlier, (started, 0)):
                lines += [{"unix_time_s": begin + clock + i + 1, "seconds": 1.0, "start": i == 0,
                           "step": step + 20 * (i + 1), "steps": 20, "host_s": phases,
                           "resident_bytes": 1 << 30, "process": {"seconds": 1.0, "cores": 0.9}}
                          for i in range(40)]
            (folder / f"rank_{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    def doctor(self, *flags, code):
        done = subprocess.run([LOCKSTEP, "doctor", *flags], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def test_a_healthy_run(self):
        self.record(HEALTHY)
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertIn("2 ranks on cpu over shm, sharded fused adamw\n", text)
        self.assertRegex(text, r"(?m)^ +1 +500 +20\.00 +2\.0 % +30\.0 % +55\.0 %")
        # The table that `lockstep run --doctor` ends with.
        self.assertRegex(text, r"(?m)^ +rank +steps +ms/step +data .* cores +memory +threads +"
                               r"page faults/s$")
        self.assertRegex(text, r"0\.50 +1\.00 GiB")
        self.assertTrue(text.endswith("healthy: no rule has found anything to change.\n"), text)
        head, row = text.splitlines()[2:4]
        self.assertEqual(len(head), len(row), text)

    def test_findings(self):
        self.record(WAITING)
        text = self.doctor(f"--run={self.root}", code=1).stdout
        self.assertRegex(text, r"(?m)^1\. loader-bound: The ranks wait for batches\. Evidence: 40")
        self.assertIn("Change: set dataloader_num_workers to 4", text)
        self.assertIn("Expected gain: about 40 %.", text)
        report = json.loads(self.doctor("--json", "--run", str(self.root), code=1).stdout)
        self.assertFalse(report["healthy"])
        self.assertEqual([f["rule"] for f in report["findings"]], ["loader-bound"])
        self.assertAlmostEqual(report["ranks"][1]["shares"]["data"], 0.4)
        self.assertAlmostEqual(report["ranks"][1]["step_s"], 0.02)

    def test_text_of_the_record_cannot_steer_the_terminal(self):
        self.record(HEALTHY)
        facts = dict(FACTS, optimizer="\x1b]0;title\x07adamw")
        (self.root / "monitor" / "run.json").write_text(json.dumps(facts))
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertNotIn("\x1b", text)
        self.assertNotIn("\x07", text)
        self.assertIn("title\\x07adamw\n", text)

    def test_an_earlier_start_is_not_judged(self):
        self.record(WAITING)
        facts = dict(FACTS, started_unix_s=1e9 + 100)
        (self.root / "monitor" / "run.json").write_text(json.dumps(facts))
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertRegex(text, r"(?m)^ +0 +0 +[0-9.]+ +[0-9.]+ GiB")
        self.assertIn("too few steps to judge the run", text)

    def test_clocks_of_hosts_that_differ_hide_no_straggler(self):
        for clocks in ([0, -3600], [0, 3600], [0, -86400 * 400]):
            for slow in (0, 3):
                self.record_hosts(clocks, slow=slow)
                report = json.loads(self.doctor("--json", "--run", str(self.root), code=1).stdout)
                self.assertEqual([(f["rule"], f["rank"]) for f in report["findings"]],
                                 [("straggler", slow)], clocks)
                self.assertEqual([r["steps"] for r in report["ranks"]], [800] * 4)
        # What an earlier start recorded, by the same clocks, does not count.
        self.record_hosts([0, -3600], started=1e9, slow=2, earlier=[(1e9 - 5000, 0)])
        report = json.loads(self.doctor("--json", "--run", str(self.root), code=1).stdout)
        self.assertEqual([r["steps"] for r in report["ranks"]], [800] * 4)

    def test_clocks_of_programs_without_steps(self):
        self.record_hosts([0, -3600], facts={"program": "python train.py"})
        for rank in range(4):
            path = self.root / "monitor" / f"rank_{rank}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                line.update(step=-1, steps=0, host_s={"other": 1.0}, collectives=20,
                            collective_share=0.1 if rank == 3 else 0.7)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        report = json.loads(self.doctor("--json", "--run", str(self.root), code=1).stdout)
        self.assertEqual([(f["rule"], f["rank"]) for f in report["findings"]], [("straggler", 3)])

    def test_a_part_of_the_ranks_is_said_and_not_compared(self):
        # The ranks here wait for rank 3, of which nothing is known on this host.
        self.record_hosts([0, 0], slow=3, ranks=(0, 1))
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertIn("nothing found. 2 of 4 ranks are recorded here, so it is not judged whether "
                      "ranks wait for each other. Copy the other hosts' monitor/rank_*.jsonl", text)
        self.assertNotIn("every rank waits", text)
        report = json.loads(self.doctor("--json", "--run", str(self.root), code=0).stdout)
        self.assertFalse(report["healthy"] or report["all_ranks_recorded"])
        # With a finding that needs no other rank it is said, too.
        self.record(WAITING)
        facts = dict(FACTS, world_size=4, hosts=2)
        (self.root / "monitor" / "run.json").write_text(json.dumps(facts))
        text = self.doctor("--run", str(self.root), code=1).stdout
        self.assertRegex(text, r"(?m)^2 of 4 ranks are recorded here")
        self.assertRegex(text, r"(?m)^1\. loader-bound")

    def test_too_early(self):
        self.record(WAITING, steps=0)
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertIn("too few steps to judge the run", text)
        report = json.loads(self.doctor("--json", "--run", str(self.root), code=0).stdout)
        self.assertFalse(report["healthy"])

    def test_refusals(self):
        for flags, text in ((["--run"], "which run"),
                            (["--run", str(self.root)], "has no record of a run"),
                            (["--run=x", "--nothing"],
                             "'--nothing' does not go with --run; --json alone does")):
            done = self.doctor(*flags, code=2)
            self.assertRegex(done.stderr, r"^lockstep: \[\w+\] ")
            self.assertIn(text, done.stderr)
        self.assertIn("usage: lockstep doctor", self.doctor("--run", "x", "--help", code=0).stdout)
        text = self.doctor("--help", code=0).stdout
        self.assertIn("lockstep doctor --run DIR [--json]\n", text)
        self.assertEqual(text.count("2 for a mistake in the command"), 2, text)


if __name__ == "__main__":
    unittest.main()

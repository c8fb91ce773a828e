"""The /metrics page in Prometheus's own checkers, and traces of processes that were killed.

The page is checked by promtool where it is installed (Debian's package prometheus) and read by the
package prometheus_client (requirements-oracles.txt); what is missing is reported.
"""

import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import time
import unittest

import fake_nvml

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
PEER = BIN / "tests" / "monitor_peer"
ROUNDS = 40 if os.environ.get("LOCKSTEP_SOAK") == "1" else 8
CHANGES = """
0 name Fake "quoted" GPU
0 uuid GPU-a
0 xid 79 0
1 uuid GPU-b
1 utilisation lost
"""


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with fake_nvml.driver(CHANGES) as environment:
            cls.text = subprocess.run([PEER, "page"], env=environment, timeout=60, check=True,
                                      stdout=subprocess.PIPE).stdout

    def test_promtool_has_no_complaint(self):
        promtool = shutil.which("promtool")
        if promtool is None:
            self.skipTest("promtool is not here (Debian's package prometheus)")
        outcome = subprocess.run([promtool, "check", "metrics"], input=self.text, timeout=60,
                                 capture_output=True)
        self.assertEqual(outcome.returncode, 0, outcome.stderr.decode())

    def test_prometheus_client_reads_it(self):
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError as missing:
            self.skipTest(f"the package prometheus_client is not here ({missing})")
        families = {f.name: f for f in text_string_to_metric_families(self.text.decode())}
        samples = {(s.name, tuple(sorted(s.labels.items()))): s.value
                   for f in families.values() for s in f.samples}
        gpu0 = (("gpu", "0"), ("uuid", "GPU-a"))
        self.assertEqual(samples["lockstep_gpu_utilization_ratio", gpu0], 0.97)
        self.assertEqual(samples["lockstep_gpu_power_watts", gpu0], 412.5)
        self.assertEqual(samples["lockstep_gpu_sm_clock_hertz", gpu0], 1.98e9)
        self.assertEqual(samples["lockstep_gpu_up", (("gpu", "1"), ("uuid", "GPU-b"))], 0)
        self.assertEqual(families["lockstep_gpu_ecc_errors"].type, "counter")
        self.assertIn(("lockstep_gpu_xid_events_total", (("gpu", "0"), ("xid", "79"))), samples)
        self.assertEqual(samples["lockstep_odd_label", (("text", 'a"b\\c\nd \U0001F600'),)], -1e-9)
        for name, family in families.items():
            self.assertTrue(family.documentation, name)


class Trace(unittest.TestCase):
    def test_a_killed_process_leaves_a_whole_trace(self):
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory(prefix="lockstep-trace-") as folder:
                path = pathlib.Path(folder) / "trace.json"
                process = subprocess.Popen([PEER, "trace", path])
                try:
                    deadline = time.monotonic() + 60
                    while not (path.exists() and path.stat().st_size > 2000):
                        self.assertLess(time.monotonic(), deadline)
                        time.sleep(0.01)
                    time.sleep(random.uniform(0, 0.3))
                finally:
                    process.kill()
                    process.wait(timeout=30)
                self.check(self.events(path.read_text()))

    def events(self, text):
        """SIGKILL cuts a write short. The format allows that the last bracket is missing then."""
        if not text.endswith("]\n"):
            text += "]"
        return json.loads(text)

    def check(self, events):
        """What Perfetto's reader of this format asks of each kind of event."""
        names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        self.assertEqual(names, {(1, "main"), (2, "backward")})
        self.assertEqual([e["args"]["name"] for e in events if e["name"] == "process_name"],
                         ["rank 1"])
        spans = [e for e in events if e["ph"] == "X"]
        self.assertGreater(len(spans), 5)
        for event in spans:
            self.assertGreater(event["dur"], 0)
            self.assertTrue(math.isfinite(event["ts"]))
        for thread in (1, 2):
            own = [e for e in spans if e["tid"] == thread]
            self.assertEqual([e["name"] for e in own], [f"step {i}" for i in range(len(own))])
            for before, after in zip(own, own[1:]):
                self.assertLessEqual(before["ts"] + before["dur"], after["ts"] + 0.001)
        self.assertTrue(any(e["ph"] == "C" and "used" in e["args"] for e in events))
        self.assertEqual({e["pid"] for e in events}, {1})


if __name__ == "__main__":
    unittest.main()

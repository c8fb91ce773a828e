"""The /metrics page in Prometheus's own checkers.

The page is checked by promtool where it is installed (Debian's package prometheus) and read by the
package prometheus_client (requirements-oracles.txt); what is missing is reported.
"""

import os
import pathlib
import shutil
import subprocess
import unittest

import fake_nvml

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
PEER = BIN / "tests" / "monitor_peer"
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
            cls.text = subprocess.run([PEER], env=environment, timeout=60, check=True,
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


if __name__ == "__main__":
    unittest.main()

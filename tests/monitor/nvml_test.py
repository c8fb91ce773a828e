"""The declarations of lockstep/monitor/nvml.cpp against NVIDIA's, and the /metrics page of what it
reads in Prometheus's own checkers.

Without a GPU: the made-up library that the other tests use answers NVIDIA's own Python binding
(nvidia-ml-py, requirements-oracles.txt) as its script says, so its functions have the real form.
With one: `lockstep env` says what nvidia-smi says. The page is checked by promtool where it is
installed (Debian's package prometheus) and read by the package prometheus_client. What is missing
is reported.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
LIBRARY = BIN.parent / "lib" / "fake_nvml_new" / "libnvidia-ml.so.1"
TWO_GPUS = (pathlib.Path(__file__).parent / "two_gpus.txt").read_text()
# Runs in a process of its own, since the binding opens the library once.
ASK = """
import json, pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
memory = n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2)
use = n.nvmlDeviceGetUtilizationRates(gpu)
try:
    n.nvmlDeviceGetPowerUsage(n.nvmlDeviceGetHandleByIndex(1))
    lost = False
except n.NVMLError_GpuIsLost:
    lost = True
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(gpu, n.nvmlEventTypeXidCriticalError, events)
event = n.nvmlEventSetWait_v2(events, 0)
print(json.dumps({
    "driver_version": n.nvmlSystemGetDriverVersion(), "count": n.nvmlDeviceGetCount(),
    "name": n.nvmlDeviceGetName(gpu), "uuid": n.nvmlDeviceGetUUID(gpu),
    "pci": n.nvmlDeviceGetPciInfo(gpu).busId, "utilisation": [use.gpu, use.memory],
    "used": memory.used, "total": memory.total,
    "used_with_reserved": n.nvmlDeviceGetMemoryInfo(gpu).used,
    "power": n.nvmlDeviceGetPowerUsage(gpu), "limit": n.nvmlDeviceGetEnforcedPowerLimit(gpu),
    "temperature": n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
    "sm_clock": n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM),
    "memory_clock": n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM),
    "reasons": n.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    "ecc": [n.nvmlDeviceGetTotalEccErrors(gpu, kind, n.NVML_VOLATILE_ECC) for kind in
            (n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)],
    "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)],
    "lost": lost, "xid": [event.eventType == n.nvmlEventTypeXidCriticalError, event.eventData]}))
"""


@contextlib.contextmanager
def driver(changes):
    """An environment in which the driver says what two_gpus.txt does, but for these lines."""
    def key(line):
        return line.split(" ")[:2]
    new = changes.strip().splitlines()
    replaced = [key(line) for line in new]
    lines = [line for line in TWO_GPUS.splitlines() if key(line) not in replaced] + new
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as script:
        script.write("\n".join(lines) + "\n")
        script.flush()
        yield os.environ | {"LOCKSTEP_NVML": str(LIBRARY), "FAKE_NVML_SCRIPT": script.name}


def env():
    return json.loads(subprocess.run([BIN / "lockstep", "env", "--json"], timeout=60, check=True,
                                     stdout=subprocess.PIPE).stdout)["nvml"]


class Fake(unittest.TestCase):
    def test_nvidias_binding_reads_the_script(self):
        try:
            import pynvml  # noqa: F401
        except ImportError as missing:
            self.skipTest(f"the package nvidia-ml-py is not here ({missing})")
        with driver("0 ecc_uncorrected 4\n1 power lost\n1 xid 79") as environment:
            answer = subprocess.run(
                [sys.executable, "-c", ASK], timeout=60, capture_output=True, text=True,
                env=environment | {"LD_LIBRARY_PATH": str(LIBRARY.parent)})
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual(json.loads(answer.stdout), {
            "driver_version": "999.1", "count": 2, "name": "Fake H200", "uuid": "GPU-aaaa",
            "pci": "00000000:1A:00.0", "utilisation": [97, 48], "used": 33554432,
            "total": 1073741824, "used_with_reserved": 34603008, "power": 412500, "limit": 700000,
            "temperature": 61, "sm_clock": 1980, "memory_clock": 2619, "reasons": 68,
            "ecc": [3, 4], "processes": [[17, 1048576], [18, None]], "lost": True,
            "xid": [True, 79]})


@unittest.skipIf(shutil.which("nvidia-smi") is None, "nvidia-smi is not here (no NVIDIA driver)")
class Real(unittest.TestCase):
    FIELDS = {"index": 0, "name": 0, "uuid": 0, "pci.bus_id": 0, "memory.total": 1,
              "memory.used": 64, "power.limit": 0.01, "power.draw": 40, "temperature.gpu": 5,
              "clocks.sm": 400, "clocks.mem": 400, "utilization.gpu": 20,
              "ecc.errors.uncorrected.volatile.total": 0}

    def test_agrees_with_nvidia_smi(self):
        before = self.nvidia_smi()
        found = env()
        after = self.nvidia_smi()
        self.assertEqual(found["problem"], "")
        self.assertEqual(len(found["devices"]), len(before))
        for gpu, first, second in zip(found["devices"], before, after):
            domain = "0000" + gpu["pci_bus_id"]
            own = {"index": gpu["index"], "name": gpu["name"], "uuid": gpu["uuid"],
                   "pci.bus_id": domain.upper() if len(domain) == 16 else gpu["pci_bus_id"],
                   "memory.total": gpu["memory_total_bytes"] / 2**20,
                   "memory.used": gpu["memory_used_bytes"] / 2**20,
                   "power.limit": gpu["power_limit_w"], "power.draw": gpu["power_w"],
                   "temperature.gpu": gpu["temperature_c"], "clocks.sm": gpu["sm_clock_mhz"],
                   "clocks.mem": gpu["memory_clock_mhz"],
                   "utilization.gpu": gpu["utilisation_percent"],
                   "ecc.errors.uncorrected.volatile.total": gpu["ecc_uncorrected"]}
            print(f"nvidia-smi before: {first}\nlockstep env:      {own}\n"
                  f"nvidia-smi after:  {second}")
            for name, slack in self.FIELDS.items():
                self.near(name, own[name], first[name], second[name], slack)

    def near(self, name, own, first, second, slack):
        """Equal, or between the two looks at it with some slack."""
        if own is None:
            self.assertIn("N/A", first)
            return
        try:
            low, high = sorted((float(first), float(second)))
        except ValueError:
            self.assertEqual(own, first, name)
            return
        self.assertGreaterEqual(float(own), low - slack, name)
        self.assertLessEqual(float(own), high + slack, name)

    def nvidia_smi(self):
        text = subprocess.run(["nvidia-smi", "--query-gpu=" + ",".join(self.FIELDS),
                               "--format=csv,noheader,nounits"], timeout=60, check=True,
                              capture_output=True, text=True).stdout
        return [dict(zip(self.FIELDS, (part.strip() for part in line.split(","))))
                for line in text.strip().split("\n")]


ODD_GPUS = """
0 name Fake "quoted" GPU
0 uuid GPU-a
0 xid 79 0
1 uuid GPU-b
1 utilisation lost
"""


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with driver(ODD_GPUS) as environment:
            cls.text = subprocess.run([BIN / "tests" / "monitor_peer"], env=environment,
                                      timeout=60, check=True, stdout=subprocess.PIPE).stdout

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

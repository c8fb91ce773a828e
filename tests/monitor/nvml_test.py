"""The declarations of lockstep/monitor/nvml.cpp against NVIDIA's.

Without a GPU: the made-up library that the other tests use answers NVIDIA's own Python binding
(nvidia-ml-py, requirements-oracles.txt) as its script says, so its functions have the real form.
With one: `lockstep env` says what nvidia-smi says. What is missing is reported.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

import fake_nvml

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
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


def env():
    return json.loads(subprocess.run([BIN / "lockstep", "env", "--json"], timeout=60, check=True,
                                     stdout=subprocess.PIPE).stdout)["nvml"]


class Fake(unittest.TestCase):
    def test_nvidias_binding_reads_the_script(self):
        try:
            import pynvml  # noqa: F401
        except ImportError as missing:
            self.skipTest(f"the package nvidia-ml-py is not here ({missing})")
        with fake_nvml.driver("0 ecc_uncorrected 4\n1 power lost\n1 xid 79") as environment:
            answer = subprocess.run(
                [sys.executable, "-c", ASK], timeout=60, capture_output=True, text=True,
                env=environment | {"LD_LIBRARY_PATH": str(fake_nvml.LIBRARY.parent)})
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


if __name__ == "__main__":
    unittest.main()

"""`lockstep doctor` as a user sees it: real ranks, limits, ports and namespaces, made-up drivers.

What needs root (a small /dev/shm, another host) is skipped without it and says so.
"""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
import unittest
import uuid

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
LIB = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "lib")
TRAIN = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "libexec", "lockstep-train")
HAS_TORCH = os.path.exists(TRAIN)
IDENTITY = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|NODE_RANK|MASTER_|TORCHELASTIC_"
                      r"|LOCKSTEP_|PET_|OMPI_|PMI|MPI_|MV2_|SLURM_|NCCL_|GLOO_|OMP_|CUDA_VISIBLE)")
NAMES = ["devices", "driver", "gpu_errors", "xid", "throttling", "gpu_memory", "gpu_per_rank",
         "cudnn", "cores", "threads", "memory", "shm", "open_files", "processes", "disk", "master",
         "interface", "port"]
HEALTHY = ("devices 2\n0 name Fake H100\n0 pci 00000000:1A:00.0\n0 used 1048576\n"
           "0 total 85899345920\n0 reasons 1\n0 ecc_corrected 0\n0 ecc_uncorrected 0\n"
           "1 name Fake H100\n1 pci 00000000:2A:00.0\n1 used 1048576\n1 total 85899345920\n"
           "1 reasons 1\n1 ecc_corrected 0\n1 ecc_uncorrected 0\n")


CACHE = tempfile.TemporaryDirectory(prefix="lockstep-doctor-")  # for the link that it keeps


def environment(**variables):
    """Says nothing about ranks, and hides the GPUs that the machine may have."""
    env = {k: v for k, v in os.environ.items() if not IDENTITY.match(k)}
    env.update(LOCKSTEP_DEVICE="cpu", LOCKSTEP_NVML="/nowhere/libnvidia-ml.so.1",
               CUDA_VISIBLE_DEVICES="", LOCKSTEP_CACHE=CACHE.name)
    env.update(variables)
    return {k: v for k, v in env.items() if v is not None}


def start(*args, program=LOCKSTEP, prefix=(), before=None, **variables):
    return subprocess.Popen([*prefix, program, "doctor", *args], env=environment(**variables),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, preexec_fn=before)


def doctor(*args, timeout=120, **options):
    process = start(*args, **options)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def checks(*args, probe=False, **options):
    """{name: check} of --json, and the result."""
    more = [] if probe else ["--no-probe"]
    result = doctor("--json", *more, *args, **options)
    if result.stdout.count("\n") != 1:
        raise AssertionError(result)
    found = json.loads(result.stdout)
    return {check["name"]: check for check in found["checks"]}, result


def has_namespaces(kind):
    return subprocess.run(["unshare", kind, "true"], capture_output=True).returncode == 0


class Output(unittest.TestCase):
    def test_json_has_every_check_with_value_and_remedy(self):
        result = doctor("--json", "--no-probe", "--nproc-per-node=2")
        self.assertEqual(result.stdout.count("\n"), 1)
        found = json.loads(result.stdout)
        self.assertEqual(set(found), {"version", "host", "ranks", "device", "checks", "counts",
                                      "exit_code"})
        self.assertEqual((found["ranks"], found["device"]), (2, "cpu"))
        self.assertEqual([check["name"] for check in found["checks"]], NAMES + ["probe"])
        for check in found["checks"]:
            self.assertEqual(set(check), {"name", "status", "value", "remedy", "data", "lines"})
            self.assertIn(check["status"], ("ok", "warn", "fail", "skip"))
            self.assertTrue(check["value"], check)
            if check["status"] in ("warn", "fail"):
                self.assertTrue(check["remedy"], check)
            if check["status"] == "ok":
                self.assertEqual(check["remedy"], "", check)
        statuses = [check["status"] for check in found["checks"]]
        self.assertEqual(found["counts"], {s: statuses.count(s)
                                           for s in ("ok", "warn", "fail", "skip")})
        self.assertEqual(found["exit_code"], result.returncode)
        self.assertEqual(result.returncode, 1 if "fail" in statuses else 0)

    def test_text_is_one_line_a_check_with_its_remedy_below(self):
        result = doctor("--no-probe", "--nproc-per-node=2", OMP_NUM_THREADS="512")
        lines = result.stdout.splitlines()
        for name in NAMES:
            found = [line for line in lines
                     if re.match(rf"(ok|warn|fail|skip) +{name} +\S", line)]
            self.assertEqual(len(found), 1, name)
        at = next(i for i, line in enumerate(lines) if re.match(r"warn +threads", line))
        self.assertRegex(lines[at + 1], r"^ +-> .*OMP_NUM_THREADS")
        self.assertRegex(lines[-1], r"^\d+ ok, \d+ to look at \(warn\), \d+ to mend first "
                                    r"\(fail\), \d+ skipped$")

    def test_usage(self):
        self.assertIn("usage: lockstep doctor", doctor("--help").stdout)
        for args, text in (
                (["--jsn"], "there is no flag --jsn. Did you mean --json?"),
                (["--nproc-per-node=two"], "--nproc-per-node"),
                (["--nproc-per-node"], "--nproc-per-node needs a value"),
                (["--master-port=70000"], "--master-port"),
                (["--json=1"], "--json takes no value")):
            result = doctor(*args)
            self.assertEqual((result.returncode, result.stdout), (2, ""), args)
            self.assertIn(text, result.stderr)

    def test_run_is_another_command(self):
        result = doctor("--run", "/nowhere/at/all")
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        self.assertIn("lockstep: [", result.stderr)

    def test_both_spellings(self):
        found, _ = checks("--nproc_per_node", "3")
        self.assertIn("3 ranks", found["cores"]["value"])
        self.assertEqual(checks("--nproc-per-node=auto")[1].returncode, 0)


class Host(unittest.TestCase):
    def test_more_ranks_than_cores(self):
        one = min(os.sched_getaffinity(0))
        found, _ = checks("--nproc-per-node=2", before=lambda: os.sched_setaffinity(0, {one}))
        self.assertEqual(found["cores"]["status"], "warn")
        self.assertIn(f"1 core for 2 ranks (affinity {one},", found["cores"]["value"])

    def test_few_open_files(self):
        found, result = checks("--nproc-per-node=4", before=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (26, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
        self.assertEqual((found["open_files"]["status"], result.returncode), ("fail", 1))
        self.assertEqual(found["open_files"]["data"]["soft"], 26)

    @unittest.skipIf("Host.test_limited_address_space" in os.environ.get("GTEST_FILTER", ""),
                     "tests/other_arch_skipped.txt")
    @unittest.skipIf(re.search("build-[at]san/", LOCKSTEP), "sanitizers need all the address space")
    def test_limited_address_space(self):
        limit = (4 << 30, 4 << 30)
        found, _ = checks(before=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
        self.assertIn(found["memory"]["status"], ("warn", "fail"))
        self.assertIn("address space limited to 4.0 GiB", found["memory"]["value"])

    @unittest.skipUnless(has_namespaces("-m"), "no mount namespaces here")
    def test_a_small_shm(self):
        mounted = ["unshare", "-m", "sh", "-c",
                   'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"]
        found, result = checks(prefix=mounted)
        self.assertEqual(found["shm"]["status"], "warn", found["shm"])
        self.assertEqual(found["shm"]["data"]["total_bytes"], 16 << 20)
        with Driver(HEALTHY) as driver:  # NCCL cannot do without
            found, result = checks(prefix=mounted, **driver)
            self.assertEqual((found["shm"]["status"], result.returncode), ("fail", 1))


def driver_version():
    """The version that the fake driver gives: that of the kernel module, if there is one."""
    try:
        with open("/proc/driver/nvidia/version") as f:
            return next((w for w in f.read().split() if re.fullmatch(r"\d+\.[\d.]+", w)), "999.1")
    except OSError:
        return "999.1"


class Driver:
    """Variables under which the fake driver shows two GPUs and NVML answers as the script says."""

    def __init__(self, script, **more):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".txt")
        self.file.write(f"system driver {driver_version()}\n" + script)
        self.file.flush()
        self.more = more

    def __enter__(self):
        return dict(LOCKSTEP_NVML=os.path.join(LIB, "fake_nvml_new", "libnvidia-ml.so.1"),
                    FAKE_NVML_SCRIPT=self.file.name, LOCKSTEP_DEVICE=None,
                    CUDA_VISIBLE_DEVICES=None,
                    LD_LIBRARY_PATH=os.path.join(LIB, "fake_cuda"), **self.more)

    def __exit__(self, *_):
        self.file.close()


class Gpus(unittest.TestCase):
    def checks(self, script, *args, more=None, **options):
        with Driver(script, **(more or {})) as variables:
            return checks(*args, **(variables | options))

    def test_healthy(self):
        found, _ = self.checks(HEALTHY)
        for name in ("devices", "driver", "gpu_errors", "throttling", "gpu_memory", "gpu_per_rank",
                     "cudnn"):
            self.assertEqual(found[name]["status"], "ok", found[name])
        self.assertIn("2 GPUs visible of 2: 2 x NVIDIA H100", found["devices"]["value"])
        self.assertIn(f"driver {driver_version()}", found["driver"]["value"])
        self.assertEqual(found["driver"]["data"]["cuda"], 13000)
        self.assertIn("2 ranks on 2 visible GPUs", found["gpu_per_rank"]["value"])

    def test_cards_that_fail(self):
        found, result = self.checks(HEALTHY + "1 power lost\n0 xid 79\n0 reasons 68\n"
                                    "0 used 40000000000\n0 processes 7:9\n")
        self.assertEqual(result.returncode, 1)
        for name, status, line in (
                ("gpu_errors", "fail", "^GPU 1 at 0000:2a:00.0: GPU is lost"),
                ("xid", "fail", "^GPU 0: Xid 79 now$"),
                ("throttling", "warn", "software power cap, hardware thermal slowdown"),
                ("gpu_memory", "warn", "by pid 7")):
            self.assertEqual(found[name]["status"], status, found[name])
            self.assertRegex(found[name]["lines"][0], line)
        self.assertEqual(result.stderr, "", "the same as lines of a log")

    def test_ranks_and_gpus(self):
        found, result = self.checks(HEALTHY, "--nproc-per-node=3")
        self.assertEqual((found["gpu_per_rank"]["status"], result.returncode), ("fail", 1))
        found, _ = self.checks(HEALTHY, "--nproc-per-node=3",
                               more=dict(LOCKSTEP_SHARE_DEVICE="1"))
        self.assertEqual(found["gpu_per_rank"]["status"], "warn")

    def test_a_driver_that_does_not_start(self):
        found, result = self.checks(HEALTHY, more=dict(FAKE_CUDA="broken"))
        self.assertEqual((found["devices"]["status"], result.returncode), ("fail", 1))
        self.assertIn("cuInit failed", found["devices"]["value"])
        self.assertIn("NVML lists 2", found["devices"]["value"])
        found, _ = self.checks("init error:9\n")
        self.assertEqual(found["driver"]["status"], "warn")
        self.assertIn("Driver Not Loaded", found["driver"]["value"])


class Network(unittest.TestCase):
    def test_an_occupied_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for more in ([], ["--master-addr=127.0.0.1"]):
                found, result = checks(f"--master-port={port}", *more)
                self.assertEqual((found["port"]["status"], result.returncode), ("fail", 1))
                self.assertIn(f"pid {os.getpid()} (", found["port"]["value"])
                self.assertIn(f"sport = :{port}", found["port"]["remedy"])
        found, _ = checks(f"--master-port={port}")
        self.assertIn(f"{port} is free", found["port"]["value"])

    def test_the_name_of_the_master(self):
        found, result = checks("--master-addr=no-such-host.invalid")
        self.assertEqual((found["master"]["status"], result.returncode), ("fail", 1))
        self.assertEqual(found["interface"]["status"], "skip")
        found, _ = checks("--master-addr=127.0.0.1")
        self.assertTrue(found["master"]["data"]["this_host"])
        self.assertTrue(found["interface"]["data"]["loopback"])

    @unittest.skipUnless(has_namespaces("-m"), "no mount namespaces here")
    def test_a_name_of_this_host_alone(self):
        """As Debian's installer writes it: other hosts cannot reach 127.0.1.1."""
        with tempfile.NamedTemporaryFile("w") as hosts:
            hosts.write("127.0.0.1 localhost\n127.0.1.1 node0.test\n")
            hosts.flush()
            mounted = ["unshare", "-m", "sh", "-c",
                       f'mount --bind {hosts.name} /etc/hosts && exec "$@"', "sh"]
            found, _ = checks("--master-addr=node0.test", prefix=mounted)
        self.assertEqual(found["master"]["status"], "warn", found["master"])
        self.assertIn("other hosts cannot reach", found["master"]["remedy"])


@unittest.skipUnless(has_namespaces("-n") and shutil.which("ip"),
                     "no network namespaces here (root, iproute2)")
class TwoHosts(unittest.TestCase):
    """The master is a network namespace at the other end of a cable."""

    def setUp(self):
        self.name = "doctor_" + uuid.uuid4().hex[:6]
        here, there = self.name + "_a", self.name + "_b"
        for namespace in (here, there):
            if subprocess.run(["ip", "netns", "add", namespace],
                              capture_output=True).returncode != 0:
                self.skipTest("ip netns does not work here")
            self.addCleanup(subprocess.run, ["ip", "netns", "del", namespace])
        self.ip("link", "add", "da", "netns", here, "type", "veth", "peer", "name", "db", "netns",
                there)
        self.here, self.there = ["ip", "netns", "exec", here], ["ip", "netns", "exec", there]

    def ip(self, *args, inside=()):
        subprocess.run([*inside, "ip", *args], check=True)

    def connect(self, net):
        for inside, device, last in ((self.here, "da", "1"), (self.there, "db", "2")):
            self.ip("addr", "add", f"{net}.{last}/24", "dev", device, inside=inside)
            self.ip("link", "set", device, "up", inside=inside)
            self.ip("link", "set", "lo", "up", inside=inside)

    def test_the_interface_and_the_port_of_a_network(self):
        self.connect("10.77.0")
        found, _ = checks("--master-addr=10.77.0.2", "--master-port=29500", prefix=self.here)
        self.assertIn("da (10.77.0.1) leads to the master", found["interface"]["value"])
        self.assertEqual(found["interface"]["status"], "ok")
        self.assertEqual(found["port"]["status"], "skip")
        # On the master itself the port is looked at on that interface.
        found, _ = checks("--master-addr=10.77.0.1", "--master-port=29500", prefix=self.here)
        self.assertIn("29500 is free", found["port"]["value"])

    def test_no_route(self):
        self.connect("10.77.0")
        found, result = checks("--master-addr=10.99.0.1", prefix=self.here)
        self.assertEqual((found["interface"]["status"], result.returncode), ("fail", 1))
        self.assertIn("no network route", found["interface"]["value"])


class Marked(unittest.TestCase):
    """Nothing with the test's mark in its environment may outlive the doctor."""

    def setUp(self):
        self.mark = "DOCTOR_MARK_" + uuid.uuid4().hex
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def marked(self, word=b""):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as e, open(f"/proc/{pid}/cmdline",
                                                                   "rb") as c:
                    if self.mark.encode() in e.read() and word in c.read():
                        found.append(int(pid))
            except OSError:
                pass
        return found

    def assert_nothing_left(self):
        end = time.monotonic() + 30
        while self.marked() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(self.marked(), [])
        self.assertEqual(os.listdir(self.folder.name), [])

    def options(self):
        return {self.mark: "1", "TMPDIR": self.folder.name}


@unittest.skipUnless(HAS_TORCH, "this build has no LibTorch")
class RealRanks(Marked):
    def test_ranks_compute_and_reduce(self):
        for ranks in (1, 2, 3):
            found, result = checks(f"--nproc-per-node={ranks}", "--probe-timeout=100", probe=True,
                                   **self.options())
            self.assertEqual(result.returncode, 0, result)
            self.assertNotIn("probe", found)
            self.assertIn("LibTorch 2.", found["libtorch"]["value"])
            self.assertEqual(len(found["compute"]["data"]["ms"]), ranks)
            self.assertEqual(found["p2p"]["status"], "skip")
            if ranks == 1:
                self.assertEqual(found["all_reduce"]["status"], "skip")
                continue
            self.assertIn(found["all_reduce"]["status"], ("ok", "warn"))  # the machine may be busy
            data = found["all_reduce"]["data"]
            self.assertEqual((data["backend"], data["right"]), ("shm", True))
            self.assertAlmostEqual(data["gb_per_s"], data["bytes"] / data["ms"] / 1e6, delta=0.01)
            self.assertAlmostEqual(data["bus_gb_per_s"],
                                   data["gb_per_s"] * 2 * (ranks - 1) / ranks, delta=0.01)
        self.assert_nothing_left()

    @unittest.skipUnless(os.path.exists(os.path.join(LIB, "liblockstep_cuda.so")),
                         "this build has no CUDA plug-in")
    def test_a_driver_that_cannot_compute(self):
        with Driver(HEALTHY) as driver:
            found, result = checks("--probe-timeout=100", probe=True, **(driver | self.options()))
        self.assertEqual((found["probe"]["status"], result.returncode), ("fail", 1))
        self.assertIn("c10::Error", " ".join(found["probe"]["lines"]))
        # What is loaded is known all the same.
        self.assertRegex(found["libtorch"]["value"], r"built for CUDA \d+\.\d+; NCCL \d+\.\d+\.\d+")
        self.assertGreater(found["cudnn"]["data"]["loaded"], 0)
        self.assert_nothing_left()

    def end_of_a_rank(self, number):
        """Sends the signal to one of two ranks as soon as it is there."""
        process = start("--json", "--nproc-per-node=2", "--probe-timeout=9", **self.options())
        end = time.monotonic() + 60
        ranks = []
        while len(ranks) < 2 and time.monotonic() < end:
            ranks = [pid for pid in self.marked(b"lockstep-train\0doctor-probe")
                     if not self.is_launcher(pid)]
        self.assertEqual(len(ranks), 2)
        os.kill(ranks[1], number)
        out, err = process.communicate(timeout=100)
        found = {check["name"]: check for check in json.loads(out)["checks"]}
        self.assertEqual((found["probe"]["status"], process.returncode), ("fail", 1), out)
        self.assert_nothing_left()
        return found["probe"], err

    @staticmethod
    def is_launcher(pid):
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return b"\0run\0" in f.read()

    def test_a_rank_that_is_stopped(self):
        probe, err = self.end_of_a_rank(signal.SIGSTOP)
        self.assertTrue(probe["lines"])
        self.assertIn("it is stopped", " ".join(probe["lines"]))
        line = "lockstep doctor: running ranks that compute and communicate ..."
        said = [text for text in err.splitlines() if text.startswith(line)]
        self.assertEqual(said[0], line, err)
        self.assertEqual(len(set(said)), len(said), err)

    def test_a_rank_that_is_killed(self):
        probe, _ = self.end_of_a_rank(signal.SIGKILL)
        self.assertIn("SIGKILL", " ".join(probe["lines"]))


@unittest.skipIf(shutil.which("nvidia-smi") is None, "nvidia-smi is not here (no NVIDIA driver)")
@unittest.skipUnless(HAS_TORCH and os.path.exists(os.path.join(LIB, "liblockstep_cuda.so")),
                     "this build has no CUDA plug-in")
class RealGpus(unittest.TestCase):
    def test_two_ranks_on_what_is_there(self):
        found, result = checks("--nproc-per-node=2", "--probe-timeout=120", probe=True,
                               LOCKSTEP_DEVICE=None, CUDA_VISIBLE_DEVICES=None, LOCKSTEP_NVML=None,
                               LOCKSTEP_SHARE_DEVICE="1", timeout=300)
        self.assertNotIn("probe", found, result)
        self.assertEqual(found["devices"]["status"], "ok", found["devices"])
        self.assertRegex(found["driver"]["value"], r"^driver \d+\.\d+.*, CUDA \d+\.\d+")
        self.assertIn("built for CUDA", found["libtorch"]["value"])
        self.assertEqual(len(found["compute"]["data"]["ms"]), 2)
        self.assertEqual((found["all_reduce"]["data"]["backend"],
                          found["all_reduce"]["data"]["right"]), ("nccl", True))


class OtherRanks(Marked):
    """Programs in the place of the ranks: the doctor judges what they do, not what they are."""

    def setUp(self):
        super().setUp()
        root = tempfile.TemporaryDirectory()
        self.addCleanup(root.cleanup)
        for name in ("bin", "libexec"):
            os.mkdir(f"{root.name}/{name}")
        self.program = shutil.copy(LOCKSTEP, root.name + "/bin/lockstep")
        self.ranks = root.name + "/libexec/lockstep-train"

    def judge(self, script, *args):
        if script is not None:
            with open(self.ranks, "w") as f:
                f.write("#!/bin/sh\n" + script)
            os.chmod(self.ranks, stat.S_IRWXU)
        found, result = checks(*args, "--nproc-per-node=2", probe=True, program=self.program,
                               **self.options())
        self.assert_nothing_left()
        return found, result

    def test_a_build_without_libtorch(self):
        found, result = self.judge(None)
        self.assertEqual(found["probe"]["status"], "skip")
        self.assertIn("has no LibTorch", found["probe"]["value"])

    def test_ranks_that_fail_leave_their_stderr(self):
        found, result = self.judge('echo "libexotic.so: cannot open" >&2; exit 3\n')
        self.assertEqual((found["probe"]["status"], result.returncode), ("fail", 1))
        self.assertIn("exited with code 3", found["probe"]["value"])
        self.assertIn("libexotic.so: cannot open", " ".join(found["probe"]["lines"]))

    def test_ranks_that_hang_cost_the_deadline(self):
        begin = time.monotonic()
        found, result = self.judge('trap "" TERM; echo before; while :; do sleep 1; done\n',
                                   "--probe-timeout=3")
        self.assertEqual((found["probe"]["status"], result.returncode), ("fail", 1))
        self.assertIn("did not finish within 3 s", found["probe"]["value"])
        self.assertIn("before", " ".join(found["probe"]["lines"]))
        self.assertIn("lockstep doctor: running ranks", result.stderr)
        self.assertGreater(time.monotonic() - begin, 3)

    def test_a_doctor_that_is_killed_leaves_no_rank(self):
        with open(self.ranks, "w") as f:
            f.write("#!/bin/sh\nexec sleep 300\n")
        os.chmod(self.ranks, stat.S_IRWXU)
        process = start("--nproc-per-node=2", program=self.program, **self.options())
        end = time.monotonic() + 60
        while len(self.marked(b"sleep")) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        end = time.monotonic() + 30
        while self.marked() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(self.marked(), [])


# ------------------------------------------------------------------ doctor --run

FACTS = {"world_size": 2, "ranks_on_host": 2, "device": "cpu", "backend": "shm",
         "optimizer": "sharded fused adamw", "program": "trainer", "cores": 8}
BALANCED = {"data": 0.02, "forward": 0.3, "backward": 0.55, "communication": 0.05,
            "optimizer": 0.08}
WAITING = {"data": 0.4, "forward": 0.2, "backward": 0.3, "communication": 0.05, "optimizer": 0.05}


class DoctorRun(unittest.TestCase):
    """`lockstep doctor --run DIR` on records written by hand."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep_doctor_run_")
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)

    def record(self, phases, steps=50, **facts):
        folder = self.root / "monitor"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(FACTS | facts))
        for rank in (0, 1):
            lines = [{"unix_time_s": 1e9 + i, "seconds": 1.0, "step": steps * i, "steps": steps,
                      "host_s": phases, "resident_bytes": 1 << 30,
                      "counts": {"batches": steps, "load_ns": steps * 40000000},
                      "process": {"seconds": 1.0, "cores": 0.5}} for i in range(10)]
            (folder / f"rank_{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))

    def doctor(self, *flags, code):
        done = subprocess.run([LOCKSTEP, "doctor", *flags], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def test_a_healthy_run(self):
        self.record(BALANCED)
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
        self.record(BALANCED, optimizer="\x1b]0;title\x07adamw")
        text = self.doctor("--run", str(self.root), code=0).stdout
        self.assertNotIn("\x1b", text)
        self.assertNotIn("\x07", text)
        self.assertIn("title\\x07adamw\n", text)

    def test_a_part_of_the_ranks_is_said_and_not_compared(self):
        for phases, code, said in ((BALANCED, 0, "nothing found. 2 of 4 ranks are recorded here, "
                                    "so it is not judged whether ranks wait for each other. Copy "
                                    "the other hosts' monitor/rank_*.jsonl"),
                                   (WAITING, 1, "\n2 of 4 ranks are recorded here")):
            self.record(phases, world_size=4, hosts=2)
            self.assertIn(said, self.doctor("--run", str(self.root), code=code).stdout)
            report = json.loads(self.doctor("--json", "--run", str(self.root), code=code).stdout)
            self.assertFalse(report["healthy"] or report["all_ranks_recorded"])

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

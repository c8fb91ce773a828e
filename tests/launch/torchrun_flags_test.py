"""torchrun's help text against ours: every option is honoured, ignored with a line, or refused."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
PYTHON = os.environ["LOCKSTEP_PYTHON"]
HAVE_TORCH = importlib.util.find_spec("torch") is not None

# A value that torchrun would accept for each flag that takes one, and what else it needs.
VALUES = {
    "nnodes": "1", "nproc-per-node": "1", "rdzv-backend": "static",
    "rdzv-endpoint": "127.0.0.1:0",
    "rdzv-id": "job", "rdzv-conf": "timeout=60", "max-restarts": "0", "monitor-interval": "0.1",
    "start-method": "spawn", "event-log-handler": "null", "role": "trainer", "log-dir": None,
    "redirects": "0", "tee": "0", "local-ranks-filter": "0", "duplicate-stdout-filters": "apple",
    "duplicate-stderr-filters": "apple", "node-rank": "0", "master-addr": "127.0.0.1",
    "master-port": "0", "local-addr": "127.0.0.1", "logs-specs": "mine", "numa-binding": "node",
    "signals-to-handle": "SIGTERM,SIGUSR1", "shutdown-timeout": "5",
    "stall-timeout": "5", "stall-action": "warn", "timeout": "60", "startup-timeout": "60",
    "line-prefix": "none", "config-file": None, "secret-file": "unused",
}


def run(args, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    env.update(variables)
    return subprocess.run([LOCKSTEP, "run", *args], env=env, capture_output=True, text=True,
                          timeout=120, stdin=subprocess.DEVNULL)


def torchrun_options():
    """[(names, takes a value)] of the option lines in `torchrun --help`."""
    text = subprocess.run([PYTHON, "-m", "torch.distributed.run", "--help"], capture_output=True,
                          text=True, timeout=120, env={**os.environ, "COLUMNS": "200"}).stdout
    options = []
    for line in text[text.index("options:"):].splitlines():
        match = re.match(r"  (-\S.*?)(?:  |$)", line)
        if match:
            spellings = match.group(1).split(", ")
            names = [spelling.split(" ")[0] for spelling in spellings]
            options.append((names, " " in spellings[0]))
    return options


class TorchrunFlags(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.logs = tempfile.TemporaryDirectory(prefix="lockstep_flags_")
        VALUES["log-dir"] = cls.logs.name
        VALUES["record"] = cls.logs.name
        VALUES["config-file"] = os.path.join(cls.logs.name, "accelerate.yaml")
        with open(VALUES["config-file"], "w") as f:
            f.write("num_processes: 1\n")
        cls.known = {}
        treatment = None
        for line in run(["--help"]).stdout.splitlines():
            treatment = {"flags:": "honoured", "refused:": "refused", "examples:": None,
                         "accepted and ignored, with a line that says so:": "ignored"}.get(
                             line, treatment)
            flag = re.match(r"  (?:(-\w), )?(--[a-z-]+)( \S)?", line)
            if treatment and flag and flag[2] != "--help":
                cls.known[flag[2]] = (treatment, "value" if flag[3] else "switch",
                                      [flag[1]] if flag[1] else [])
        assert len(cls.known) > 25, "the help text was not understood"

    @classmethod
    def tearDownClass(cls):
        cls.logs.cleanup()

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_every_option_of_torchrun_is_known_and_of_the_same_kind(self):
        options = torchrun_options()
        self.assertGreater(len(options), 25, "the help text was not understood")
        for names, takes_value in options:
            if "--help" in names:
                continue
            long_names = {n.replace("_", "-") for n in names if n.startswith("--")}
            self.assertEqual(len(long_names), 1, names)
            name = long_names.pop()
            self.assertIn(name, self.known, f"torchrun's {name} is not in our table")
            _, kind, letter = self.known[name]
            self.assertEqual(kind, "value" if takes_value else "switch", name)
            self.assertEqual(letter, [n for n in names if not n.startswith("--")], name)
            self.assertIn(name, run(["--help"]).stdout)

    def args_for(self, flag, spelling):
        name = flag[2:].replace("-", "_") if spelling == "_" else flag[2:]
        if self.known[flag][1] == "switch":
            return ["--" + name]
        return [f"--{name}={VALUES[flag[2:]]}"]

    def check(self, flag, result):
        treatment = self.known[flag][0]
        if treatment == "refused":
            self.assertEqual(result.returncode, 2, flag)
            variable = "PET_" + flag[2:].upper().replace("-", "_")
            self.assertRegex(result.stderr, rf"({flag}|{variable}) is not supported:")
        elif flag == "--dashboard" and "was built without it" in result.stderr:
            self.assertEqual(result.returncode, 2, result.stderr)  # of libmicrohttpd
        else:
            self.assertEqual(result.returncode, 0, f"{flag}: {result.stderr}")
            ignored = re.search(r"\S+ is ignored: .*", result.stderr)
            self.assertEqual(bool(ignored), treatment == "ignored", f"{flag}: {result.stderr}")

    def program_for(self, flag):
        return {"--module": ["this"], "--run-path": [self.script()]}.get(flag, ["true"])

    def test_every_flag_does_what_its_row_says(self):
        for flag in self.known:
            for spelling in "-_":
                with self.subTest(flag=flag, spelling=spelling):
                    args = self.args_for(flag, spelling) + self.program_for(flag)
                    self.check(flag, run(args, PYTHON_EXEC=PYTHON))

    def test_every_flag_is_read_from_its_variable(self):
        for flag, (_, kind, _) in self.known.items():
            with self.subTest(flag=flag):
                variable = "PET_" + flag[2:].upper().replace("-", "_")
                value = "1" if kind == "switch" else VALUES[flag[2:]]
                result = run(self.program_for(flag), PYTHON_EXEC=PYTHON, **{variable: value})
                self.check(flag, result)

    def script(self):
        path = os.path.join(self.logs.name, "script")
        with open(path, "w") as f:
            f.write("print('ran')\n")
        return path

    def test_gpus_are_counted_through_the_driver(self):
        fake = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "lib", "fake_cuda")
        args = ["--nproc-per-node=gpu", "sh", "-c", "echo size=$WORLD_SIZE"]
        result = run(args, LD_LIBRARY_PATH=fake)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("size=2"), 2)


# What `accelerate config` writes for two processes on one machine without GPUs.
GENERATED = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


class AcceleratesFile(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory(prefix="lockstep_accelerate_")
        self.addCleanup(place.cleanup)
        self.file = os.path.join(place.name, "default_config.yaml")

    def run_with(self, text, *args, **variables):
        with open(self.file, "w") as f:
            f.write(text)
        show = "echo size=$WORLD_SIZE,$ACCELERATE_MIXED_PRECISION,$LOCKSTEP_DEVICE,"
        return run(["--config-file", self.file, *args, "sh", "-c", show], **variables)

    def test_the_file_that_accelerate_writes_starts_ranks(self):
        # The tests' own environment says cpu already; empty counts as unset.
        result = self.run_with(GENERATED, LOCKSTEP_DEVICE="")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("size=2,bf16,cpu,"), 2, result.stdout)
        result = self.run_with(GENERATED, LOCKSTEP_DEVICE="cuda:1", PET_NPROC_PER_NODE="3")
        self.assertEqual(result.stdout.count("size=3,bf16,cuda:1,"), 3, result.stdout)
        result = self.run_with(GENERATED, "--nproc-per-node=1", PET_NPROC_PER_NODE="3")
        self.assertEqual(result.stdout.count("size=1,"), 1, result.stdout)
        result = self.run_with(GENERATED, "--standalone")
        self.assertEqual((result.returncode, result.stdout.count("size=2,")), (0, 2), result.stderr)


# Prints its variables as JSON; rank 1 of 2 does.
DUMP = "import json, os; os.environ['RANK'] == '1' and print('@' + json.dumps(dict(os.environ)))"
# Different in every run, or different on purpose (docs/environment.md).
CHOSEN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
          "OMP_NUM_THREADS"}


class WorkerVariables(unittest.TestCase):
    @staticmethod
    def environment_of(launcher):
        # Stale values, which both launchers must override.
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "RANK": "77",
               "WORLD_SIZE": "88", "LC_ALL": "C.UTF-8"}
        args = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--role=trainer",
                 "--no-python", PYTHON, "-c", DUMP]
        result = subprocess.run(launcher + args, env=env, capture_output=True, text=True,
                                timeout=120, stdin=subprocess.DEVNULL)
        line = result.stdout[result.stdout.index("@") + 1:].splitlines()[0]
        return {k: v for k, v in json.loads(line).items() if env.get(k) != v}

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_workers_get_every_variable_of_torchrun_with_its_meaning(self):
        theirs = self.environment_of([PYTHON, "-m", "torch.distributed.run"])
        ours = self.environment_of([LOCKSTEP, "run"])
        self.assertGreater(len(theirs), 18)
        self.assertEqual(set(theirs) - set(ours), set())
        for name in set(theirs) - CHOSEN:
            self.assertEqual(ours[name], theirs[name], name)
        self.assertTrue(os.path.isabs(ours["TORCHELASTIC_ERROR_FILE"]))


# Lines in one write each: torchrun's own are torn where there are several.
SHOW = """import os, sys
os.write(1, f"out {os.environ['RANK']} {' '.join(sys.argv[1:])}\\n".encode())
os.write(2, f"err {os.environ['RANK']}\\n".encode())
"""


class LikeTorchrun(unittest.TestCase):
    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_a_directory_as_program_teed_lines_and_the_log_directory(self):
        seen = []
        for launcher in ([PYTHON, "-m", "torch.distributed.run"], [LOCKSTEP, "run"]):
            with tempfile.TemporaryDirectory(prefix="lockstep_like_") as place:
                program = os.path.join(place, "program")
                os.mkdir(program)
                with open(os.path.join(program, "__main__.py"), "w") as f:
                    f.write(SHOW)
                result = subprocess.run(
                    [*launcher, "--nproc-per-node=2", "--role=r", "--tee=0:3", "--rdzv-id=job",
                     f"--log-dir={place}/logs", program, "a"], capture_output=True, text=True,
                    env={**os.environ, "PYTHON_EXEC": PYTHON, "OMP_NUM_THREADS": "1"}, timeout=120,
                    stdin=subprocess.DEVNULL)
                files = [re.sub("/job_[a-z0-9_]{8}(?=/|$)", "/job_<random>",
                                os.path.relpath(os.path.join(folder, name), place))
                         for folder, names, more in os.walk(f"{place}/logs")
                         for name in names + more]
                seen.append((result.returncode, sorted(result.stdout.splitlines()),
                             sorted(result.stderr.splitlines()), sorted(files)))
        self.assertEqual(seen[1], seen[0])
        self.assertEqual(seen[0][1], ["[r0]:out 0 a", "out 1 a"])


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=2).result.wasSuccessful() else 1)

"""The `lockstep` program as a user sees it: output, exit codes, `lockstep env`, start-up cost."""
import hashlib
import json
import os
import re
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
import unittest

LOCKSTEP = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
SOURCE = os.environ["LOCKSTEP_SOURCE"]
IDENTITY = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|NODE_RANK|MASTER_|TORCHELASTIC_"
                      r"|LOCKSTEP_|PET_|OMPI_|PMI|MPI_|MV2_|SLURM_|NCCL_|GLOO_|OMP_|CUDA_VISIBLE)")


def lockstep(*args, program=LOCKSTEP, timeout=60, cwd=None, **variables):
    """Runs it with an environment that says nothing about ranks but `variables`."""
    env = {k: v for k, v in os.environ.items() if not IDENTITY.match(k)}
    env.update(variables)
    return subprocess.run([program, *args], env=env, timeout=timeout, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, cwd=cwd)


class Program(unittest.TestCase):
    def test_links_no_torch(self):
        # As ldd does it, but for programs of any architecture that the kernel can start.
        listed = lockstep(LD_TRACE_LOADED_OBJECTS="1").stdout
        # Names alone: an address can contain "c10", too.
        libraries = " ".join(line.split()[0] for line in listed.splitlines())
        self.assertIn("libc.so", libraries)
        for name in ("torch", "c10", "cuda", "gloo", "nccl"):
            self.assertNotIn(name, libraries)

    # `./dev test --other-arch` names what it skips as GoogleTest reads it.
    @unittest.skipIf("Program.test_starts_in_milliseconds" in os.environ.get("GTEST_FILTER", ""),
                     "tests/other_arch_skipped.txt")
    @unittest.skipIf("SANITIZED" in os.environ, "a sanitizer's own start takes longer")
    def test_starts_in_milliseconds(self):
        def once():
            start = time.monotonic()
            self.assertEqual(lockstep("--version").returncode, 0)
            return (time.monotonic() - start) * 1000
        times = []
        # The fastest of some: other work on the machine slows them down, never speeds one up.
        while not times or (min(times) >= 100 and len(times) < 50):
            times.append(once())
        self.assertLess(min(times), 100, f"median {statistics.median(times):.0f} ms")

    def test_version(self):
        for word in ("--version", "-V", "version"):
            result = lockstep(word)
            self.assertEqual(result.returncode, 0)
            self.assertRegex(result.stdout, r"^lockstep \d+\.\d+\.\d+\n"
                             r"commit ([0-9a-f]{12}|unknown)\n"
                             r"torch (\d+\.\d+\.\d+|none)\n"
                             r"compiler \w+ [\d.]+\n"
                             r"To report a problem, see \S*CONTRIBUTING\.md\.\n$")

    def test_version_is_that_of_the_header(self):
        with open(SOURCE + "/lockstep/version.h") as f:
            parts = re.findall(r"define LOCKSTEP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", f.read())
        self.assertEqual(lockstep("--version").stdout.split("\n")[0],
                         "lockstep " + ".".join(parts))

    @unittest.skipUnless(os.path.dirname(os.environ["LOCKSTEP_BIN"]).startswith(SOURCE + "/"),
                         "this build tree is not in the source tree")
    def test_help_and_version_name_pages_that_exist(self):
        text = lockstep("--help").stdout + lockstep("--version").stdout
        pages = re.findall(r"(\S+?)[.,]?(?=\s)", text[text.index("Documentation:"):])
        pages = [page for page in pages if page.endswith((".md", "docs"))]
        self.assertEqual(len(pages), 4, text)
        for page in pages:
            self.assertTrue(os.path.isabs(page) and os.path.exists(page), page)

    def test_help_lists_what_is_installed(self):
        """Python's wheel has the launcher alone, without the programs that need LibTorch."""
        with tempfile.TemporaryDirectory(prefix="lockstep_cli_") as root:
            os.makedirs(root + "/bin")
            shutil.copy(LOCKSTEP, root + "/bin/lockstep")
            def listed():
                text = lockstep("--help", program=root + "/bin/lockstep").stdout
                return re.findall(r"^  (\w+) +\w", text, re.MULTILINE), text
            names, text = listed()
            self.assertEqual(names, ["run", "doctor", "env", "checkpoint", "config", "plan", "data",
                                     "monitor", "dashboard", "ledger", "report",
                                     "lockstep"][:len(names)])
            self.assertIn("verify, show and compare checkpoints", text)
            self.assertNotIn("import", text)
            os.makedirs(root + "/libexec")
            for name in ("lockstep-train", "lockstep-bench"):
                with open(f"{root}/libexec/{name}", "w", encoding="utf-8") as f:
                    f.write("#!/bin/sh\n")
                os.chmod(f"{root}/libexec/{name}", 0o755)
            names, text = listed()
            for name in ("train", "generate", "bench"):
                self.assertIn(name, names)
            self.assertIn("import and merge checkpoints", text)

    def test_a_program_without_documentation_names_the_page(self):
        with tempfile.TemporaryDirectory(prefix="lockstep_cli_") as root:
            os.makedirs(root + "/a/bin")
            program = shutil.copy(LOCKSTEP, root + "/a/bin/lockstep")
            self.assertIn("see CONTRIBUTING.md.\n", lockstep("--version", program=program).stdout)
            os.makedirs(root + "/a/share/doc/lockstep/docs")
            with open(root + "/a/share/doc/lockstep/docs/api.md", "w"):
                pass
            self.assertIn(f"see {root}/a/share/doc/lockstep/CONTRIBUTING.md.\n",
                          lockstep("--version", program=program).stdout)

    def test_help_lists_the_commands(self):
        for word in ("--help", "-h", "help"):
            result = lockstep(word)
            self.assertEqual(result.returncode, 0)
            for name in ("run", "env", "report"):
                self.assertRegex(result.stdout, rf"\n  {name} +\w")

    def test_without_a_command_prints_help_and_fails(self):
        result = lockstep()
        self.assertEqual(result.returncode, 2)
        self.assertIn("usage: lockstep COMMAND", result.stderr)

    def test_unknown_command_names_the_nearest(self):
        result = lockstep("rnu")
        self.assertEqual(result.returncode, 2)
        self.assertIn("lockstep: [lockstep] there is no command 'rnu'. Did you mean run?",
                      result.stderr)
        self.assertNotIn("Did you mean", lockstep("elephant").stderr)

    def test_usage_errors_of_run_end_with_two(self):
        result = lockstep("run", "--nproc-per-mode=2", "true")
        self.assertEqual(result.returncode, 2)
        self.assertIn("Did you mean --nproc-per-node?", result.stderr)
        for flag in ("--gpu=2", "--gpus=2", "--devices=2"):
            result = lockstep("train", "t.yaml", flag)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"there is no flag {flag[:-2]}. Write --nproc-per-node=N",
                          result.stderr)
        for flag in ("--num_processes=2", "--machine_rank=1"):
            result = lockstep("train", "t.yaml", flag)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"there is no flag {flag[:-2]}. Did you mean --n", result.stderr)
        result = lockstep("run", "./no/such/program")
        self.assertEqual(result.returncode, 2)
        self.assertIn("does not exist", result.stderr)


class TorchCommands(unittest.TestCase):
    """They are executed from ../libexec relative to the program, wherever that is."""

    def setUp(self):
        self.root = tempfile.mkdtemp(prefix="lockstep_cli_")
        self.addCleanup(shutil.rmtree, self.root)
        os.mkdir(self.root + "/bin")
        self.program = shutil.copy(LOCKSTEP, self.root + "/bin/lockstep")

    def test_a_missing_program_is_explained(self):
        result = lockstep("bench", program=self.program)
        self.assertEqual(result.returncode, 1)
        self.assertIn("'bench' needs LibTorch and is in " + self.root + "/libexec/lockstep-bench",
                      result.stderr)

    def test_arguments_and_exit_code_pass_through(self):
        os.mkdir(self.root + "/libexec")
        path = self.root + "/libexec/lockstep-bench"
        with open(path, "w") as f:
            f.write("#!/bin/sh\nprintf '<%s>' \"$@\"\nexit 7\n")
        os.chmod(path, stat.S_IRWXU)
        result = lockstep("bench", "a b", "--x=1", program=self.program)
        self.assertEqual((result.returncode, result.stdout), (7, "<bench><a b><--x=1>"))


class Env(unittest.TestCase):
    def test_start_up_lines_have_time_and_level(self):
        result = lockstep("env", WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT="1234", CUDA_VISIBLE_DEVICES="")
        self.assertEqual(result.returncode, 0, result.stderr)
        stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info \[env\] "
        for text in ("WORLD_SIZE=2", "RANK=1", "LOCAL_RANK=1"):
            self.assertRegex(result.stdout, rf"(?m)^{stamp}{text}$")
        self.assertIn("identity    rank 1 of 2, local rank 1 of 2, node 0 (from: environment)",
                      result.stdout)
        self.assertIn("rendezvous  127.0.0.1:1234, a store hosted by rank 0", result.stdout)

    def test_nothing_set_is_a_world_of_one_and_says_so(self):
        result = lockstep("env")
        self.assertEqual(result.returncode, 0)
        self.assertIn("warning [env] WORLD_SIZE is not set: this is a world of one. Start several "
                      "ranks with lockstep run", result.stdout)
        self.assertIn("info [env] RANK is not set", result.stdout)
        self.assertRegex(result.stdout, r"(?m)^  WORLD_SIZE \(not set\) +number of ranks")
        self.assertIn("backend     single (a world of one needs none)", result.stdout)

    def test_json_is_one_line_with_the_same_facts(self):
        result = lockstep("env", "--json", WORLD_SIZE="4", RANK="2", LOCAL_RANK="0",
                          LOCAL_WORLD_SIZE="2", GROUP_RANK="1", MASTER_ADDR="10.0.0.1",
                          MASTER_PORT="99", LOCKSTEP_DEVICE="cpu", NCCL_FAKE="x", SECRET="hidden")
        self.assertEqual(result.stdout.count("\n"), 1)
        found = json.loads(result.stdout)
        expected = {"rank": 2, "world_size": 4, "local_rank": 0, "node": 1}
        self.assertEqual({key: found["identity"][key] for key in expected}, expected)
        self.assertEqual(found["device"], {"name": "cpu", "reason": "LOCKSTEP_DEVICE=cpu"})
        self.assertEqual(found["backend"], {
            "name": "gloo", "reason": "the device is cpu and there are ranks on other hosts"})
        self.assertEqual(found["variables"]["NCCL_FAKE"], "x")
        self.assertNotIn("SECRET", found["variables"])
        self.assertGreaterEqual(found["cores"], 1)
        one_host = lockstep("env", "--json", WORLD_SIZE="2", RANK="1", LOCAL_RANK="1",
                            LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
                            LOCKSTEP_DEVICE="cpu")
        self.assertEqual(json.loads(one_host.stdout)["backend"], {
            "name": "shm", "reason": "the device is cpu; gloo where ranks cannot share memory"})

    def test_contradictions_are_reported_with_the_variables(self):
        result = lockstep("env", RANK="3", WORLD_SIZE="2")
        self.assertEqual(result.returncode, 2)
        self.assertIn("error [env] [rank] RANK=3 does not exist in a world of WORLD_SIZE=2",
                      result.stdout)
        self.assertIn("\n  RANK=3", result.stdout)

    def fake_gpus(self, **variables):
        """The same with a driver that shows two GPUs."""
        fake = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "lib", "fake_cuda")
        self.assertTrue(os.path.exists(fake + "/libcuda.so.1"))
        return json.loads(lockstep("env", "--json", LD_LIBRARY_PATH=fake, **variables).stdout)

    def test_gpus_choose_device_and_backend(self):
        two = dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        found = self.fake_gpus(**two)
        self.assertEqual(found["gpus"]["count"], 2)
        self.assertEqual(found["device"]["name"], "cuda:1")
        self.assertEqual(found["backend"]["name"], "nccl")
        self.assertEqual(self.fake_gpus(**two, LOCKSTEP_BACKEND="gloo")["device"]["name"], "cpu")
        four = dict(two, WORLD_SIZE="4", RANK="3", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4")
        self.assertIn("local rank 3 wants cuda:3, but 2 CUDA devices are visible.",
                      self.fake_gpus(**four)["problem"])
        shared = self.fake_gpus(**four, LOCKSTEP_SHARE_DEVICE="1")
        self.assertEqual(shared["device"]["name"], "cuda:1")
        # The second host of two: its ranks are 2 and 3.
        second = dict(two, WORLD_SIZE="4", RANK="3", GROUP_RANK="1", MASTER_ADDR="n0")
        found = self.fake_gpus(**second)
        self.assertEqual((found["device"]["name"], found.get("problem") or ""), ("cuda:1", ""))

    def test_gpus_are_listed_with_what_they_do(self):
        fake = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "lib", "fake_nvml_new",
                            "libnvidia-ml.so.1")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as script:
            script.write("devices 2\n0 name Fake H200\n0 pci 00000000:1A:00.0\n0 utilisation 97\n"
                         "0 used 33554432000\n0 total 85899345920\n0 power 412000\n"
                         "0 temperature 61\n0 processes 17:1024\n1 name Fake H200\n"
                         "1 pci 00000000:2A:00.0\n1 utilisation lost\n")
            script.flush()
            variables = dict(LOCKSTEP_NVML=fake, FAKE_NVML_SCRIPT=script.name)
            text = lockstep("env", **variables).stdout
            found = json.loads(lockstep("env", "--json", **variables).stdout)["nvml"]
        self.assertIn("\n  GPU 0     Fake H200 at 0000:1a:00.0: 97 %, 31.2 of 80.0 GiB, 412 W, "
                      "61 C\n", text)
        self.assertIn("\n  GPU 1     Fake H200 at 0000:2a:00.0: GPU is lost", text)
        self.assertEqual(found["driver_version"], "999.1")
        first, second = found["devices"]
        self.assertEqual((first["utilisation_percent"], first["memory_used_bytes"],
                          first["power_w"], first["sm_clock_mhz"]), (97, 33554432000, 412.0, None))
        self.assertEqual(first["processes"], [{"pid": 17, "memory_bytes": 1024}])
        self.assertIn("GPU is lost", second["problem"])
        self.assertIsNone(second["utilisation_percent"])

    def test_monitor_without_a_run_shows_every_gpu(self):
        """Live, with the processes of whoever started them."""
        fake = os.path.join(os.path.dirname(os.environ["LOCKSTEP_BIN"]), "lib", "fake_nvml_new",
                            "libnvidia-ml.so.1")
        with tempfile.TemporaryDirectory(prefix="lockstep_cli_") as root:
            path = os.path.join(root, "script.txt")
            with open(path, "w", encoding="utf-8") as script:
                script.write("devices 2\n0 name Fake H200\n0 pci 00000000:1A:00.0\n"
                             "0 utilisation 97 41\n0 used 33554432000\n0 total 85899345920\n"
                             f"0 processes {os.getpid()}:1073741824,18:-\n1 name Fake A100\n"
                             "1 pci 00000000:2A:00.0\n1 utilisation 3\n")
            # A job that hides the GPUs from CUDA does not hide them here.
            variables = dict(LOCKSTEP_NVML=fake, FAKE_NVML_SCRIPT=path, CUDA_VISIBLE_DEVICES="")
            done = lockstep("monitor", "--once", cwd=root, **variables)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("2 GPUs, driver 999.1\n", done.stdout)
            self.assertIn("GPU 0  Fake H200 at 0000:1a:00.0: 97 %, 31.2 of 80.0 GiB", done.stdout)
            self.assertRegex(done.stdout, rf"process {os.getpid()} +1.0 GiB")
            self.assertRegex(done.stdout, r"process 18 +-")
            self.assertIn("GPU 1  Fake A100 at 0000:2a:00.0: 3 %\n  no process\n", done.stdout)
            found = json.loads(lockstep("monitor", "--once", "--json", cwd=root,
                                        **variables).stdout)
            self.assertEqual(found["devices"][0]["utilisation_percent"], 97)
            env = {k: v for k, v in os.environ.items() if not IDENTITY.match(k)} | variables
            with subprocess.Popen([LOCKSTEP, "monitor"], env=env, cwd=root, text=True,
                                  stdout=subprocess.PIPE) as process:
                try:
                    self.assertIn("0: 97 %", process.stdout.readline())
                    deadline = time.monotonic() + 60
                    while "0: 41 %" not in process.stdout.readline():
                        self.assertLess(time.monotonic(), deadline)
                finally:
                    process.terminate()
            variables["LOCKSTEP_NVML"] = "/nowhere/libnvidia-ml.so.1"
            done = lockstep("monitor", cwd=root, **variables)
            self.assertEqual(done.returncode, 2)
            self.assertIn("no run was named, and the GPUs of this machine cannot be shown",
                          done.stderr)
            self.assertNotIn("..", done.stderr)

    def test_without_nvml_nothing_is_listed(self):
        variables = dict(LOCKSTEP_NVML="/nowhere/libnvidia-ml.so.1", CUDA_VISIBLE_DEVICES="")
        self.assertNotIn("NVML", lockstep("env", **variables).stdout.split("variables")[0])
        found = json.loads(lockstep("env", "--json", **variables).stdout)["nvml"]
        self.assertEqual(found["devices"], [])
        self.assertIn("is not there", found["problem"])

    def test_idle_gpus_are_warned_about(self):
        warnings = " ".join(self.fake_gpus()["warnings"])
        self.assertIn("2 GPUs are visible but there is one rank: the others stay idle. Use "
                      "lockstep run --nproc-per-node=gpu.", warnings)

    def test_misspelt_variables_are_warned_about(self):
        result = lockstep("env", LOCKSTEP_BACKND="gloo", LOCKSTEP_LERNING_RATE="1",
                          LOCKSTEP_ELEPHANT="1", LOCKSTEP_DEVICE="cpu")
        self.assertEqual(result.returncode, 0)
        for text in ("LOCKSTEP_BACKND is set, but nothing reads it. Did you mean LOCKSTEP_BACKEND?",
                     "LOCKSTEP_LERNING_RATE is set, but nothing reads it. Did you mean "
                     "LOCKSTEP_LEARNING_RATE?",
                     "LOCKSTEP_ELEPHANT is set, but nothing reads it.\n"):
            self.assertIn("warning [env] " + text, result.stdout)
        self.assertNotIn("LOCKSTEP_DEVICE is set", result.stdout)
        found = json.loads(lockstep("env", "--json", LOCKSTEP_BACKND="gloo").stdout)
        self.assertIn("LOCKSTEP_BACKEND?", " ".join(found["warnings"]))

    def test_documented_variables_are_not_warned_about(self):
        with open(os.path.join(SOURCE, "docs", "environment.md")) as f:
            names = set(re.findall(r"`(LOCKSTEP_[A-Z_]*[A-Z])`", f.read()))
        self.assertGreater(len(names), 20)
        found = json.loads(lockstep("env", "--json", **{name: "1" for name in names}).stdout)
        self.assertEqual([w for w in found["warnings"] if "nothing reads it" in w], [],
                         "cli/env.cpp must list these")

    def test_help_and_unknown_flags(self):
        self.assertIn("usage: lockstep env", lockstep("env", "--help").stdout)
        result = lockstep("env", "--jsn")
        self.assertEqual(result.returncode, 2)
        self.assertIn("there is no flag --jsn. Did you mean --json?", result.stderr)

    def test_under_the_launcher_every_rank_prints_its_rank(self):
        result = lockstep("run", "--standalone", "--nproc-per-node=2", "--redirects=1",
                          "--log-dir=" + self.logs(), "lockstep", "env", "--json",
                          CUDA_VISIBLE_DEVICES="")  # two ranks, also where there is one GPU
        self.assertEqual(result.returncode, 0, result.stderr)
        found = []
        for folder, _, files in os.walk(self.log_dir):
            if "stdout.log" in files:
                with open(folder + "/stdout.log") as f:
                    found.append(json.loads(f.read()))
        self.assertEqual(sorted(f["identity"]["rank"] for f in found), [0, 1])
        for f in found:
            self.assertEqual(f["identity"]["source"], "lockstep run")
            self.assertEqual(f["identity"]["world_size"], 2)
            self.assertEqual(f["variables"]["LOCKSTEP_RUN"], f["variables"]["TORCHELASTIC_RUN_ID"])
            self.assertEqual(f["variables"]["TORCHELASTIC_USE_AGENT_STORE"], "True")
            self.assertIn("LOCKSTEP_STORE_CHANNEL", f["variables"])

    def logs(self):
        self.log_dir = tempfile.mkdtemp(prefix="lockstep_cli_logs_")
        self.addCleanup(shutil.rmtree, self.log_dir)
        return self.log_dir


class Documentation(unittest.TestCase):
    def test_environment_page_names_every_variable(self):
        with open(os.path.join(SOURCE, "docs", "environment.md")) as f:
            page = f.read()
        names = set(json.loads(lockstep("env", "--json").stdout)["known"])
        # And what the sources read, found by the calls that read it.
        call = re.compile(r'(?:env::get(?:_int|_bool)?|getenv|number|variable)'
                          r'\(\s*"([A-Z][A-Z0-9_]+)"')
        for folder in ("lockstep", "cli"):
            for where, _, files in os.walk(os.path.join(SOURCE, folder)):
                for name in files:
                    if name.endswith((".cpp", ".h", ".cu")) and "test" not in name:
                        with open(os.path.join(where, name)) as f:
                            names.update(call.findall(f.read()))
        self.assertGreater(len(names), 40)
        missing = [name for name in sorted(names) if f"`{name}`" not in page]
        self.assertEqual(missing, [], "docs/environment.md must explain these")

    def test_env_knows_every_variable_that_sets_the_rank(self):
        known = set(json.loads(lockstep("env", "--json").stdout)["known"])
        with open(os.path.join(SOURCE, "lockstep", "rendezvous", "rank_env.cpp")) as f:
            read = set(re.findall(r'"([A-Z][A-Z0-9]+_[A-Za-z0-9_]+|RANK)"', f.read()))
        self.assertGreater(len(read), 40)
        self.assertEqual(sorted(read - known), [], "cli/env.cpp must list these")

    def test_pet_variables_are_explained(self):
        with open(os.path.join(SOURCE, "docs", "environment.md")) as f:
            self.assertIn("`PET_", f.read())


class ForeignText(unittest.TestCase):
    """A file may say anything: no command sends control characters of it to a terminal."""
    ESCAPED = rb"\u001b]0;title\u0007 \u009b2J \u0000 \u007f"  # in JSON
    VALID = b"\x1b]0;title\x07 \xc2\x9b2J"
    RAW = b"\x9b2J \x00 \x1b[2J \xff"

    def folder(self, text):
        """A run's folder, with the text in every file."""
        held = tempfile.TemporaryDirectory(prefix="lockstep-cli-")
        self.addCleanup(held.cleanup)
        out = held.name
        for name in ("a", "b", "monitor", "json"):
            os.mkdir(os.path.join(out, name))
        state = b'{"epoch": 1.0, "global_step": 5, "max_steps": 5, "log_history": [], "%s": %d}'
        tensors = (b'{"__metadata__":{"%s":"%s"},"%s%d":{"dtype":"U8","shape":[1],'
                   b'"data_offsets":[0,1]}}')
        for number, name in enumerate(("a", "b")):
            header = tensors % (text, text, text, number)
            self.put(out, f"{name}/trainer_state.json", state % (text, number))
            self.put(out, f"{name}/model.safetensors",
                     len(header).to_bytes(8, "little") + header + b"x")
            self.put(out, f"{name}/SHA256SUMS", self.manifest(text))
            self.put(out, f"{name}/optimizer.safetensors", text)
        self.put(out, "a/sampler.json", b'{"%s": 1}' % text)
        self.put(out, "monitor/run.json", b'{"program": "%s", "failure": "%s", "device": "%s"}' %
                 (text, text, text))
        self.put(out, "monitor/rank_0.jsonl", b'{"%s": 1}\n' % text)
        self.put(out, "metrics.jsonl", b'{"step": 1, "%s": 1.0, "run_name": "%s"}\n' % (text, text))
        self.put(out, "effective_config.json", b'{"%s": "%s"}' % (text, text))
        self.put(out, "text", text)
        self.put(out, "chat.jsonl", b'{"messages": [{"role": "user", "content": "%s"}, '
                 b'{"role": "assistant", "content": "%s"}]}\n' % (text, text))
        self.put(out, "wrong.jsonl", b'{"%s": "%s"}\n' % (text, text))
        self.put(out, "json/config.json", b'{"model_type": "llama", "hidden_act": "%s"}' % text)
        self.put(out, "key.yaml", b'model: {name: mlp}\n"%s": 1\n' % text)
        self.put(out, "value.yaml", b'model: {name: mlp}\noptim: "%s"\nrun_name: "%s"\n' %
                 (text, text))
        self.put(out, "bare.yaml", b"model: {name: %s}\n" % text)
        self.put(out, "path.yaml", b"model: {path: %s}\n" % os.path.join(out, "json").encode())
        return out

    @staticmethod
    def put(out, name, content):
        with open(os.path.join(out, name), "wb") as file:
            file.write(content)

    @staticmethod
    def manifest(text):
        """As lockstep/io/manifest.cpp writes it."""
        with open(os.path.join(SOURCE, "lockstep/io/manifest.cpp")) as source:
            title = re.search(r'kTitle =\s*((?:"[^"]*"\s*)+);', source.read()).group(1)
        title = "".join(re.findall(r'"([^"]*)"', title)).replace("\\n", "\n")
        body = (title.encode() + b"# bytes: 1\n" + b"0" * 64 + b"  " + text + b"\n")
        return (body + b"# digest of the lines above: " +
                hashlib.sha256(body).hexdigest().encode() + b"\n")

    def commands(self, out):
        a, b = os.path.join(out, "a"), os.path.join(out, "b")
        yield ("checkpoint", "verify", a)
        yield ("checkpoint", "show", a, "--tensors")
        yield ("checkpoint", "diff", a, b)
        for name in ("key.yaml", "value.yaml", "bare.yaml", "path.yaml"):
            file = os.path.join(out, name)
            yield ("config", "check", file)
            yield ("config", "check", file, "--launcher")
            yield ("config", "show", file, "--all")
            yield ("config", "show", file, "--json")
            yield ("plan", file, "--gpus", "2xH100-80GB")
            yield ("run", "--config_file", file, "true")
        for name in ("text", "chat.jsonl", "wrong.jsonl"):
            yield ("data", "inspect", os.path.join(out, name))
        yield ("monitor", "--once", out)
        yield ("monitor", "--once", "--json", out)
        yield ("doctor", "--run", out)
        yield ("doctor", "--run", out, "--json")
        yield ("report", out, "-o", os.path.join(out, "report.html"))
        yield ("ledger", os.path.join(out, "text"))
        if os.path.exists(os.path.join(os.path.dirname(LOCKSTEP), "..", "libexec",
                                       "lockstep-train")):
            for name in ("key.yaml", "value.yaml", "bare.yaml", "path.yaml"):
                yield ("train", os.path.join(out, name), "--output_dir", os.path.join(out, "run"))
                yield ("run", "--standalone", LOCKSTEP, "train", os.path.join(out, name),
                       "--output_dir", os.path.join(out, "run"))
            for folder in (a, os.path.join(out, "json")):
                yield ("generate", "--model", folder, "--prompt", "x")
            yield ("checkpoint", "import", os.path.join(out, "text"), os.path.join(out, "imported"))
            yield ("checkpoint", "merge", a, os.path.join(out, "merged"))

    def test_no_control_character_of_a_file_reaches_the_terminal(self):
        for text in (self.ESCAPED, self.VALID, self.RAW):
            out = self.folder(text)
            for command in self.commands(out):
                with self.subTest(" ".join(command), text=text):
                    done = subprocess.run([LOCKSTEP, *command], timeout=120, capture_output=True,
                                          stdin=subprocess.DEVNULL, cwd=out, check=False,
                                          env={**os.environ, "LOCKSTEP_DEVICE": "cpu"})
                    said = (done.stdout + done.stderr).decode()  # it is UTF-8
                    self.assertGreaterEqual(done.returncode, 0, said)
                    self.assertNotRegex(said, "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")


if __name__ == "__main__":
    sys.exit(0 if unittest.main(exit=False, verbosity=1).result.wasSuccessful() else 1)

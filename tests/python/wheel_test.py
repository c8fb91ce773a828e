"""The wheel in an empty environment: its launcher starts scripts, and gloo is replaced on request.

The environment sees the torch of this interpreter (and the frameworks, where they are installed)
through a .pth file; what is tested comes from the wheel. 77: the wheel cannot be built here.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import venv
import zipfile

SOURCE = pathlib.Path(os.environ.get("LOCKSTEP_SOURCE")
                      or pathlib.Path(__file__).resolve().parents[2])
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BIN") or SOURCE / "build/bin").parent
BUILDER = SOURCE / "python/lockstep_build.py"
SCRIPT = SOURCE / "tests/python/frameworks.py"
LIMIT_S = 600
OURS = "lockstep_torch._C"
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("LOCKSTEP_", "PYTHON"))}
ENVIRONMENT |= {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def output_of(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True,
                          timeout=LIMIT_S, check=False, **options)
    return done.returncode, done.stdout, done.stderr


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="lockstep-wheel-")
        cls.addClassCleanup(cls.folder.cleanup)
        folder = pathlib.Path(cls.folder.name)
        code, text, errors = output_of(
            sys.executable, "-B", BUILDER, "--into", BUILD / "python", "--wheel", folder,
            env=os.environ | {"LOCKSTEP_LAUNCHER": str(BUILD / "portable/lockstep")})
        assert code == 0, text + errors
        cls.wheel = next(folder.glob("*.whl"))
        cls.env = folder / "env"
        venv.create(cls.env, with_pip=False, symlinks=True)
        code, text, errors = output_of(
            sys.executable, "-m", "pip", "--python", cls.env / "bin/python3", "install", "-q",
            "--no-deps", "--no-index", "--disable-pip-version-check", cls.wheel)
        assert code == 0, text + errors
        site = next((cls.env / "lib").glob("python3*/site-packages"))
        (site / "packages_of_the_tests.pth").write_text(
            "\n".join(p for p in sys.path if p.endswith("-packages")))

    def start(self, *arguments, flags=()):
        """Two ranks. PATH leads neither to the launcher nor to its interpreter."""
        process = subprocess.Popen(
            [str(self.env / "bin/lockstep"), "run", "--standalone", "--nproc-per-node=2", *flags,
             str(SCRIPT), *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=ENVIRONMENT | {"HOME": self.folder.name})
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)  # the first of them; the launcher stops its ranks
        return process

    def weights(self, process):
        """What both ranks print identically: the weights, and who made the group."""
        text, _ = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 0, text)
        lines = set(re.findall(r"weights (\w+) by (\S+)", text))
        self.assertEqual(text.count("weights "), 2, text)
        self.assertEqual(len(lines), 1, text)
        return lines.pop()

    def same_as_gloo(self, name):
        processes = [self.start(name), self.start(name, flags=["--replace-gloo"])]
        (gloo, maker), (replaced, other_maker) = map(self.weights, processes)
        self.assertNotEqual(maker, OURS)
        self.assertEqual(other_maker, OURS)
        self.assertEqual(gloo, replaced)
        return gloo

    def test_contents(self):
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        self.assertTrue(self.wheel.name.endswith(f"-{tag}-{tag}-{machine}.whl"), self.wheel.name)
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
            record = wheel.read(next(n for n in names if n.endswith("/RECORD")))
            self.assertEqual(len(record.splitlines()), len(names))
        self.assertFalse([n for n in names if "__pycache__" in n], names)

    def test_launcher_needs_libc_alone(self):
        if not shutil.which("readelf"):
            self.skipTest("no readelf")
        _, text, _ = output_of("readelf", "-d", self.env / "bin/lockstep")
        needed = set(re.findall(r"NEEDED.*\[(\S+?)\.so", text))
        self.assertLessEqual(needed, {"libc", "libm", "ld-linux-aarch64", "ld-linux-x86-64"}, text)
        code, text, _ = output_of(self.env / "bin/lockstep", "--version", env={})
        self.assertEqual((code, text.split()[0]), (0, "lockstep"))
        # What needs a program that the wheel does not have is not offered.
        code, text, _ = output_of(self.env / "bin/lockstep", "--help", env={})
        self.assertEqual(code, 0)
        self.assertIn("\n  run  ", text)
        self.assertNotRegex(text, r"\n  (train|generate|bench) ")

    def test_the_launcher_is_configured_without_tests(self):
        """As pip does it where no launcher is given. That it compiles is shown by the build."""
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DLOCKSTEP_TORCH_FREE_ONLY=ON",
                   "-DLOCKSTEP_BUILD_TESTS=OFF"]
        code, text, errors = output_of("cmake", "-S", SOURCE, "-B",
                                       pathlib.Path(self.folder.name) / "launcher", *options)
        self.assertEqual(code, 0, text + errors)

    def test_without_torch(self):
        """The sentence that pip shows where the environment has no torch."""
        code, _, text = output_of(self.env / "bin/python3", "-S", "-B", BUILDER, "--check", env={})
        self.assertNotEqual(code, 0)
        self.assertIn("has no torch. Install torch 2.11 or newer into it first", text)

    def test_names(self):
        """It may be imported by name, before torch, which finds it by itself in the other tests."""
        program = ("import lockstep_torch, torch; "
                   "assert torch.distributed.is_backend_available('lockstep')")
        code, _, errors = output_of(self.env / "bin/python3", "-c", program, env=ENVIRONMENT)
        self.assertEqual(code, 0, errors)
        code, _, errors = output_of(self.env / "bin/python3", "-B", "-c", "import torch",
                                    env=ENVIRONMENT | {"LOCKSTEP_REPLACE_GLOO": "maybe"})
        self.assertNotEqual(code, 0)
        self.assertIn("LOCKSTEP_REPLACE_GLOO='maybe' is neither true nor false", errors)

    def test_plain_ddp(self):
        lockstep = self.start("plain", "lockstep")
        weights = self.same_as_gloo("plain")
        self.assertEqual(self.weights(lockstep), (weights, OURS))

    def test_accelerate(self):
        if importlib.util.find_spec("accelerate") is None:
            self.skipTest("Accelerate is not installed")
        self.same_as_gloo("accelerate")

    def test_lightning(self):
        if importlib.util.find_spec("pytorch_lightning") is None:
            self.skipTest("Lightning is not installed")
        self.same_as_gloo("lightning")


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print(f"SKIP 1: {sys.executable} has no torch")
        sys.exit(77)
    unittest.main(verbosity=2)

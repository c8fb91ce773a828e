"""`lockstep bench NAME`: --help and usage errors."""
import re
import unittest

from bench_case_for_test import bench

# Options that have a default to show; paths have none.
DEFAULTS = {
    "launch": ("--ranks", "--rounds"),
    "allreduce": ("--ranks", "--rounds", "--backends", "--sizes"),
    "kernels": ("--device", "--rows", "--rounds"),
    "recipes": ("--accumulation", "--updates", "--rounds", "--peer-modes"),
    "scale": ("--ranks", "--steps", "--rounds", "--threads", "--output"),
    "dp-vs-ddp": ("--ranks", "--steps", "--batch_size", "--model", "--image_size", "--device"),
    "presets": ("--ranks", "--steps", "--rounds", "--threads"),
    "ablation": ("--ranks", "--steps", "--rounds", "--workers", "--threads"),
}
TAKES_A_FILE = {"presets", "ablation", "recipes"}


def entries(text):
    """{flag: (left column, meaning)} of a help text; long left columns have a line of their own."""
    found, flag = {}, None
    for line in text.splitlines():
        match = re.match(r"  (?:-\w,)?(--[\w-]+)(.*)", line)
        if match:
            flag = match.group(1)
            found[flag] = match.group(2)
        elif flag and line.startswith("   "):
            found[flag] += " " + line.strip()
    return found


class Arguments(unittest.TestCase):
    def test_help_explains_every_option_with_its_default(self):
        for name, defaults in DEFAULTS.items():
            done = bench(name, "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"Usage: lockstep bench {name} [OPTIONS]", done.stdout)
            found = entries(done.stdout)
            self.assertGreater(len(found), 3)
            for flag in defaults:
                # "--ranks INT:INT in [1 - 64]=4" or "... [4]", by the version of CLI11.
                shown = re.sub(r"in \[[^]]*\]", "", found[flag])
                self.assertRegex(shown, r"[=\[][\w.,-]+(\]|\s)", done.stdout)
            for flag, text in found.items():
                tokens = re.sub(r"[A-Z]+(:\S+)?|\[.*?\]|\([^)]*\)", " ", text, count=1).split()
                self.assertGreaterEqual(len([t for t in tokens if t.isalpha() and t.islower()]), 2,
                                        f"{name} {flag} is not explained:{text}")

    def test_dp_vs_ddp_measures_a_hundred_steps_of_sixty_four_samples(self):
        found = entries(bench("dp-vs-ddp", "--help").stdout)
        for flag, default in (("--steps", 100), ("--batch_size", 64)):
            self.assertRegex(found[flag], rf"[=\[]{default}\b")

    def test_a_mistake_is_reported_in_one_line_with_exit_code_two(self):
        for name in DEFAULTS:
            for arguments, part in ((["--rankz", "3"], "--rankz"), (["--csv"], "--csv"),
                                    (["elephant"], "elephant")):
                if arguments == ["elephant"] and name in TAKES_A_FILE:
                    continue
                done = bench(name, *arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertTrue(done.stderr.startswith(f"lockstep bench {name}: "), done.stderr)
                self.assertIn(part, done.stderr)
        self.assertIn("there is no option --step (did you mean --steps?).",
                      bench("dp-vs-ddp", "--step", "20").stderr)
        done = bench("presets", "--ranks", "1")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--ranks", done.stderr)
        self.assertEqual(bench("elephant").returncode, 2)

    def test_an_invalid_value_is_reported_clearly(self):
        cases = [(("kernels", "--device", "foo"), "--device: 'foo' is not a device; use cpu,"),
                 (("loader", "--device", "cuda:x"), "--device: 'cuda:x' is not a device"),
                 (("step", "--seconds", "nan"), "--seconds: 'nan' is not a number above zero")]
        # Where there are fewer GPUs than that, as on any machine.
        cases += [((name, "--device", "cuda:999"), "--device cuda:999: ")
                  for name in ("kernels", "loader")]
        for arguments, part in cases:
            with self.subTest(arguments):
                done = bench(*arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()

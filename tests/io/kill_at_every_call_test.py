"""Kills a save at each of its mutating system calls, and makes each of them fail.

`strace` delivers SIGKILL, or an error, at the n-th call of a kind. Killed before every call in
turn, the save has been in every state it can leave behind. After each: the newest valid checkpoint
is the old one or the new one and holds what it should, nothing has to be passed over, a sweep
removes what is left, and the next save works.
"""

import collections
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from io_case import BOUND_S, PEER, peer, skip

# Those this machine has; strace passes over names with a question mark that it does not know.
MUTATING = ("mkdir mkdirat open openat creat write pwrite64 writev fsync fdatasync rename renameat "
            "renameat2 unlink unlinkat rmdir link linkat symlink symlinkat ftruncate fallocate "
            "chmod fchmod fchmodat").split()
LINE = re.compile(r"^\d+\s+(\w+)\((.*)\)\s+= (\S+)")
# How many calls a small checkpoint needs at least: if fewer are seen, the trace is not understood.
FEWEST = 25

Call = collections.namedtuple("Call", "name count arguments")


def strace(*options):
    return ["strace", "-f", "-qq", *options]


def calls_of(log, place):
    """The calls that change something in `place`, each with its number among those of its name."""
    counts = collections.Counter()
    found = []
    for line in log.splitlines():
        match = LINE.match(line)
        if not match:
            continue
        name, arguments, _ = match.groups()
        counts[name] += 1
        if name in ("open", "openat") and "O_CREAT" not in arguments:
            continue
        if place not in arguments:
            continue  # its output, and what a sanitizer does
        found.append(Call(name, counts[name], arguments))
    return found


class KillAtEveryCall(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="lockstep-io-")
        cls.addClassCleanup(cls.directory.cleanup)
        cls.template = os.path.join(cls.directory.name, "template")
        for step in (1, 2):
            outcome = peer("save", cls.template, step, 2)
            assert outcome.returncode == 0, outcome.stderr
        work = cls.copy("trace")
        log = os.path.join(cls.directory.name, "log")
        outcome = peer("save", work, 3, 2, wrap=strace(
            "-y", "-s", "512", "-o", log, "-e", "trace=" + ",".join("?" + c for c in MUTATING)))
        assert outcome.returncode == 0, outcome.stderr
        with open(log, encoding="utf-8", errors="replace") as file:
            cls.calls = calls_of(file.read(), work)
        renames = [i for i, call in enumerate(cls.calls)
                   if call.name.startswith("rename") and "checkpoint-3.tmp-" in call.arguments]
        assert len(renames) == 1, cls.calls
        cls.commit = renames[0]

    @classmethod
    def copy(cls, name):
        work = os.path.join(cls.directory.name, name)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(cls.template, work)
        return work

    def newest(self, work, allowed):
        outcome = peer("check", work)
        self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)
        self.assertNotRegex(outcome.stdout, "passed|broken")
        step = int(re.search(r"newest (\d+)", outcome.stdout).group(1))
        self.assertIn(step, allowed)
        return step

    def continues(self, work):
        """The next start sweeps and saves, and what remains is two checkpoints and nothing else."""
        outcome = peer("save", work, 4, 2)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        self.newest(work, [4])
        names = sorted(os.listdir(work))
        self.assertEqual(len(names), 2, names)
        self.assertTrue(all(re.fullmatch(r"checkpoint-\d", name) for name in names), names)

    def test_every_call_is_seen(self):
        self.assertGreaterEqual(len(self.calls), FEWEST, self.calls)

    def test_files_are_durable_before_the_name_and_the_name_before_deletion(self):
        before, after = self.calls[:self.commit], self.calls[self.commit + 1:]
        created = [re.search(r'"([^"]+)"', c.arguments).group(1) for c in before
                   if c.name in ("open", "openat")]
        self.assertEqual(len(created), 5, created)
        for path in created:
            touched = [i for i, c in enumerate(before)
                       if c.name in ("write", "fsync") and f"{path}>" in c.arguments]
            self.assertTrue(touched, path)
            self.assertEqual(before[touched[-1]].name, "fsync", f"{path}: written after its fsync")
        self.assertEqual(before[-1].name, "fsync", "the directory is synced last")
        self.assertRegex(before[-1].arguments, r"checkpoint-3\.tmp-[^/]*>$")
        self.assertEqual(after[0].name, "fsync", "the parent is synced first")
        self.assertRegex(after[0].arguments, r"/trace>$")

    def test_killed_at_every_call(self):
        for index, call in enumerate(self.calls):
            with self.subTest(call=call):
                work = self.copy("kill")
                outcome = peer("save", work, 3, 2, wrap=strace(
                    "-o", "/dev/null", "-e", f"trace={call.name}",
                    "-e", f"inject={call.name}:signal=SIGKILL:when={call.count}"))
                self.assertIn(outcome.returncode, (-9, 137), outcome.stdout + outcome.stderr)
                self.newest(work, [2] if index <= self.commit else [3])
                self.continues(work)

    def test_every_call_fails(self):
        for index, call in enumerate(self.calls[:self.commit + 1]):
            with self.subTest(call=call):
                work = self.copy("fail")
                error = "ENOSPC" if index % 2 else "EIO"
                outcome = peer("save", work, 3, 2, wrap=strace(
                    "-o", "/dev/null", "-e", f"trace={call.name}",
                    "-e", f"inject={call.name}:error={error}:when={call.count}"))
                self.assertEqual(outcome.returncode, 1, outcome.stdout + outcome.stderr)
                self.assertRegex(outcome.stderr, r"^\[io\] cannot .*checkpoint-3.*: .*\. ")
                if error == "ENOSPC":
                    self.assertRegex(outcome.stderr, r"iB free|bytes free")
                self.newest(work, [2])
                self.assertEqual(sorted(os.listdir(work)), ["checkpoint-1", "checkpoint-2"])

    def test_a_full_disk(self):
        """A real one: a small file system, where that may be mounted."""
        place = os.path.join(self.directory.name, "small")
        os.makedirs(place, exist_ok=True)
        script = (f"mount -t tmpfs -o size=160k none {place} && cd {place} || exit 99\n"
                  f"{PEER} save . 1 2 && {PEER} save . 2 2 && "
                  # Room is left for what is asked for in advance, not for what is written.
                  "head -c $(($(df --output=avail -B1 . | tail -1) - 20480)) /dev/zero >filler\n"
                  f"{PEER} save . 3 2; echo code $?; {PEER} check .; ls")
        outcome = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True,
                                 text=True, timeout=BOUND_S, check=False)
        if outcome.returncode == 99 or "unshare" in outcome.stderr:
            self.skipTest("no file system can be mounted here")
        self.assertIn("code 1", outcome.stdout, outcome.stderr)
        self.assertRegex(outcome.stderr,
                         r"cannot write to .* needed, .* free\): .*\. Free some space")
        self.assertIn("newest 2", outcome.stdout)
        self.assertNotIn(".tmp-", outcome.stdout)


if __name__ == "__main__":
    if shutil.which("strace") is None:
        skip("strace is not installed (apt-get install strace)")
    if subprocess.run(strace("-o", "/dev/null", "-e", "inject=fsync:error=EIO:when=1", "true"),
                      capture_output=True, check=False).returncode != 0:
        skip("strace cannot trace processes here")
    unittest.main()

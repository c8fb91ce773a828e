"""The output of ranks through `lockstep run`: whole lines, complete, live, without blocking."""
import contextlib
import hashlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
import unittest

from launch_case import BOUND_S, Case

# A small file system of its own, for stdout and, where asked for, stderr; printed at the end.
SMALL_DISK = ("unshare", "--map-root-user", "--mount", "bash", "-c",
              'mount -t tmpfs -o size=256k none "$DISK" || exit 99; exec 3>&2; '
              'if [ "$SHARED" ]; then exec 3>>"$DISK/out"; fi; "$@" >>"$DISK/out" 2>&3 3>&-; '
              'code=$?; cat "$DISK/out"; exit $code', "bash")
HAVE_SMALL_DISK = subprocess.run([*SMALL_DISK, "true"], capture_output=True,
                                 env={**os.environ, "DISK": "/tmp"}).returncode == 0


class Console(Case):
    # A rank continues when the test has seen what it waited for, and not before.
    UNTIL_SEEN = "while [ ! -e $NOTES/seen ]; do sleep 0.02; done"

    def seen(self, name="seen"):
        with open(os.path.join(self.notes, name), "w"):
            pass

    # Its output is many times what pipes and the launcher hold, so most of it finds the disk full.
    FULL = ('until_out() { until grep -q $1 $DISK/out; do echo $1; sleep 0.05; done; }; '
            'until_out before; dd if=/dev/zero of=$DISK/rest bs=4k 2>/dev/null; '
            'yes xxxxxxx | head -c 4000000; ')

    def on_a_small_disk(self, script, shared, *flags):
        disk = os.path.join(self.dir.name, "disk")
        os.makedirs(disk, exist_ok=True)
        process = self.start_bash(1, self.FULL + script, *flags, prefix=SMALL_DISK,
                                  env={"DISK": disk, "SHARED": shared})
        code, out, err = self.finish(process)
        os.rmdir(disk)
        self.assertEqual(code, 3, err)
        return out, out if shared else err

    @unittest.skipUnless(HAVE_SMALL_DISK, "needs a mount namespace")
    def test_a_full_disk_silences_the_launcher_only_while_it_is_full(self):
        for shared in ("", "yes"):
            with self.subTest(shared=shared):
                out, err = self.on_a_small_disk("rm $DISK/rest; until_out after; exit 3", shared)
                self.assertTrue(out.startswith("before\n"), out[:100])
                lost = re.search(r"^\[launch\] the disk was full: (\d+) bytes of output are lost "
                                 r"here\.$", out, re.M)
                self.assertTrue(lost, out[-300:])
                self.assertGreater(int(lost[1]), 3_000_000)
                self.assertIn("\nafter\n", out[lost.end():])
                self.assertIn("failed: exited with code 3", err)
                if not shared:
                    self.assertIn("stdout cannot be written: the disk is full", err)

    @unittest.skipUnless(HAVE_SMALL_DISK, "needs a mount namespace")
    def test_a_log_file_on_a_full_disk_is_written_again(self):
        logs = os.path.join(self.dir.name, "disk", "logs")
        _, err = self.on_a_small_disk(
            'log=$(dirname $TORCHELASTIC_ERROR_FILE)/stdout.log; rm $DISK/rest; '
            'until grep -q after $log; do echo after; sleep 0.05; done; cp $log $NOTES/log; exit 3',
            "", f"--log-dir={logs}", "--tee=1")
        self.assertRegex(err, rf"\[launch\] {logs}/\S+/stdout.log cannot be written: No space")
        with open(os.path.join(self.notes, "log")) as f:
            self.assertRegex(f.read(), r"(?s)^before\n.*\n\[launch\] about \d+ bytes of output are "
                                       r"lost here\.\n.*after\n$")

    @unittest.skipUnless(HAVE_SMALL_DISK, "needs a mount namespace")
    def test_a_disk_that_stays_full_ends_the_run_as_well(self):
        _, err = self.on_a_small_disk("exit 3", "")
        self.assertIn("failed: exited with code 3", err)

    def test_lines_are_never_torn(self):
        # Long lines in pieces, short ones in one write, and a line longer than any pipe. What a
        # rank begins with less than 4096 bytes and leaves for 200 ms is taken for a prompt, and a
        # busy machine may make any two writes that late. So all beginnings are of that size.
        program = os.path.join(self.dir.name, "talk.py")
        with open(program, "w") as f:
            f.write(r'''
import os, sys
rank = os.environ["RANK"]
for i in range(300):
    line = f"<{rank}:{i}:" + rank * (10 + 97 * i % 9000) + ">\n"
    stream, part = (1, 1000) if i % 3 == 0 else (1 + i % 2, 4096)
    os.write(stream, line[:4096].encode())
    for begin in range(4096, len(line), part):
        os.write(stream, line[begin:begin + part].encode())
rest = f"<{rank}:300:" + rank * 1_500_000 + ">\n"
rest = rest[os.write(1, rest[:4096].encode()):]
while rest:
    rest = rest[os.write(1, rest.encode()):]
''')
        process = self.start("--standalone", "--nproc-per-node=6", program,
                             stderr=subprocess.STDOUT)
        code, out, _ = self.finish(process, 2 * BOUND_S)
        self.assertEqual(code, 0, out[-2000:])
        seen = {}
        for line in out.splitlines():
            if line.startswith("[launch]"):
                continue
            match = re.fullmatch(r"\[(\d)\] <(\d):(\d+):(\d*)>", line)
            self.assertTrue(match, line[:200])
            rank, again, number, body = match.groups()
            self.assertEqual(rank, again)
            length = 1_500_000 if number == "300" else 10 + 97 * int(number) % 9000
            self.assertEqual(body, rank * length)
            seen.setdefault(rank, []).append(int(number))
        self.assertEqual({rank: sorted(numbers) for rank, numbers in seen.items()},
                         {str(rank): list(range(301)) for rank in range(6)})

    def test_streams_stay_apart(self):
        code, out, err = self.bash(2, 'echo to out; echo to err >&2')
        self.assertEqual(code, 0)
        self.assertEqual(sorted(out.splitlines()), ["[0] to out", "[1] to out"])
        self.assertEqual(sorted(err.splitlines()), ["[0] to err", "[1] to err"])

    def test_lines_come_at_once_and_a_prompt_soon(self):
        process = self.start_bash(2, 'echo line; [ $RANK = 0 ] && printf "your name? "; '
                                  f'{self.UNTIL_SEEN}; echo; '
                                  'if [ $RANK = 1 ]; then printf "no newline"; fi')
        # All of it while the ranks wait, so nothing but silence brings the prompt.
        self.wait_line(process.stdout, "[0] line\n", "[1] line\n", "your name? ")
        self.seen()
        code, out, _ = self.finish(process)
        self.assertEqual(code, 0)
        self.assertIn("[1] no newline\n", out)

    def test_a_partial_line_is_ended_before_another_rank_prints(self):
        process = self.start_bash(2, 'if [ $RANK = 0 ]; then printf beginning; '
                                  f'{self.UNTIL_SEEN}; echo " end"; else '
                                  'while [ ! -e $NOTES/begun ]; do sleep 0.02; done; '
                                  'echo between; fi')
        self.wait_line(process.stdout, "beginning")
        self.seen("begun")
        self.wait_line(process.stdout, "between\n")
        self.seen()
        code, out, _ = self.finish(process)
        self.assertEqual(code, 0)
        self.assertEqual(out, "[0] beginning\n[1] between\n[0]  end\n")

    def test_a_progress_bar_keeps_its_prefix(self):
        code, out, _ = self.bash(1, r'for i in 1 2 3; do printf "\r$i/3"; sleep 0.05; done; echo',
                                 flags=("--line-prefix=rank",))
        self.assertEqual(code, 0)
        # Read as text, so each return is a newline here.
        self.assertEqual(out, "[0] \n[0] 1/3\n[0] 2/3\n[0] 3/3\n")

    def test_a_terminal_sees_lines_while_the_run_continues(self):
        parent, child = pty.openpty()
        try:
            process = self.start_bash(2, f'echo hello; echo $$ > $NOTES/up.$RANK; '
                                      f'{self.UNTIL_SEEN}', stdout=child, stderr=child)
            os.close(child)
            self.wait_notes("up", 2)
            got = b""
            while got.count(b"hello") < 2:
                self.assertTrue(select.select([parent], [], [], BOUND_S)[0], got)
                got += os.read(parent, 4096)
            self.assertIsNone(process.poll())
            self.seen()
            self.assertEqual(process.wait(BOUND_S), 0)
        finally:
            os.close(parent)

    def test_the_prefix_can_be_chosen_as_with_torchrun(self):
        template = "<${role_name} ${rank}/${local_rank}>:"
        template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
        for flags in ((), ("--tee=3",)):
            _, out, _ = self.bash(2, "echo x", flags=("--role=trainer", *flags), env=template)
            self.assertEqual(sorted(out.splitlines()), ["<trainer 0/0>:x", "<trainer 1/1>:x"])
        _, out, _ = self.bash(2, "echo x", flags=("--line-prefix=none",), env=template)
        self.assertEqual(out, "x\nx\n")

    def test_the_output_of_one_rank_can_be_piped_byte_for_byte(self):
        data = r'"{\"a\": 1}\n\000\r\377 no newline at the end"'
        for flags, n in (((), 1), (("--line-prefix=none", "--local-ranks-filter=1"), 2)):
            process = subprocess.run(
                [self.launcher(), "run", "--standalone", f"--nproc-per-node={n}", *flags,
                 "--no-python", "bash", "-c", f"printf {data}"], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, env=self.environment(), timeout=BOUND_S, check=True)
            self.assertEqual(process.stdout, b'{"a": 1}\n\0\r\xff no newline at the end')

    def test_the_line_prefix_is_rank_role_or_none(self):
        for flags, n, wanted in (
                ((), 1, ["x"]), ((), 2, ["[0] x", "[1] x"]),
                (("--line-prefix=rank",), 1, ["[0] x"]),
                (("--line-prefix=role", "--role=eval"), 2, ["[eval0]:x", "[eval1]:x"]),
                (("--line-prefix=none",), 2, ["x", "x"])):
            with self.subTest(flags=flags, n=n):
                code, out, err = self.bash(n, "echo x; echo x >&2", flags=flags)
                self.assertEqual((code, sorted(out.splitlines()), sorted(err.splitlines())),
                                 (0, wanted, wanted))
        _, out, _ = self.bash(2, "echo x", env={"PET_LINE_PREFIX": "none"})
        self.assertEqual(out, "x\nx\n")

    def test_stdin_is_inherited(self):
        process = subprocess.Popen(
            [self.launcher(), "run", "--standalone", "--nproc-per-node=1", "--no-python", "bash",
             "-c", "read word; echo got $word"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment())
        out, _ = process.communicate("something\n", timeout=BOUND_S)
        self.assertEqual(out, "got something\n")

    def test_a_console_that_goes_away_does_not_end_the_run(self):
        logs = os.path.join(self.dir.name, "logs")
        process = self.start("--standalone", "--nproc-per-node=2", "--tee=3", f"--log-dir={logs}",
                             "--no-python", "bash", "-c",
                             'for i in $(seq 20000); do echo line $i of $RANK; done; echo done >&2')
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=BOUND_S)
        self.assertEqual(process.returncode, 0, err)
        self.assertEqual(sorted(err.splitlines()), ["[default0]:done", "[default1]:done"])
        for rank in (0, 1):
            with open(self.log(logs, rank, "stdout.log")) as f:
                self.assertEqual(f.read(),
                                 "".join(f"line {i} of {rank}\n" for i in range(1, 20001)))

    def test_closed_standard_descriptors(self):
        process = self.start_bash(1, "echo $$ > $NOTES/up.0; echo out; echo err >&2; exit 3",
                                  prefix=("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"))
        self.assertEqual(process.wait(BOUND_S), 3)
        self.wait_notes("up", 1)

    def test_a_stuck_console_holds_only_the_noisy_rank(self):
        # Nobody reads: rank 0 fills its quota and waits, rank 1 works on, supervision works on.
        process = self.start_bash(2, 'if [ $RANK = 0 ]; then echo $$ > $NOTES/up.0; exec yes; fi; '
                                  'for i in $(seq 200); do echo quiet; done; sleep 0.5; '
                                  'echo $$ > $NOTES/done.1; sleep 300')
        self.wait_notes("done", 1)
        time.sleep(0.3)
        os.kill(self.wait_notes("done", 1)[1], signal.SIGKILL)
        code, out, err = self.finish(process)
        self.assertEqual(code, 137, err)
        self.assertEqual(out.count("[1] quiet\n"), 200)
        # Once this reads, rank 0 writes on until its SIGTERM, 100 ms after the other's death; had
        # it never waited there would be gigabytes.
        self.assertLess(len(out), 128 << 20)


class Files(Case):
    def files(self, logs):
        found = {}
        for folder, _, names in os.walk(logs):
            for name in names:
                path = os.path.join(folder, name)
                with open(path) as f:
                    found[os.path.relpath(path, logs).split("/", 1)[1]] = f.read()
        return found

    def run_logged(self, *flags, n=2, script="echo out $RANK; echo err $RANK >&2"):
        logs = os.path.join(self.dir.name, "logs")
        process = self.start(f"--nproc-per-node={n}", f"--log-dir={logs}", "--rdzv-id=job", *flags,
                             "--no-python", "bash", "-c", script)
        code, out, err = self.finish(process)
        self.assertEqual(code, 0, err)
        return self.files(logs), sorted(out.splitlines()), sorted(err.splitlines())

    def test_redirect_is_file_only(self):
        files, out, err = self.run_logged("-r", "3")
        self.assertEqual(files, {f"attempt_0/{r}/std{s}.log": f"{s} {r}\n"
                                 for r in (0, 1) for s in ("out", "err")})
        self.assertEqual((out, err), ([], []))

    def test_the_layout(self):
        self.run_logged("-r", "1")
        logs = os.path.join(self.dir.name, "logs")
        self.assertRegex(os.listdir(logs)[0], "^job_[0-9a-f]{8}$")
        self.assertTrue(os.path.exists(self.log(logs, 1, "stdout.log")))

    def test_a_second_run_with_the_same_id_keeps_the_logs_of_the_first(self):
        for text in ("first", "second"):
            self.run_logged("-r", "1", script=f"echo {text}")
        found = []
        for folder, _, names in os.walk(os.path.join(self.dir.name, "logs")):
            for name in names:
                with open(os.path.join(folder, name)) as f:
                    found.append(f.read())
        self.assertEqual(sorted(found), ["first\n"] * 2 + ["second\n"] * 2)

    def test_tee_is_both(self):
        files, out, err = self.run_logged("-t", "1")
        self.assertEqual(files, {f"attempt_0/{r}/stdout.log": f"out {r}\n" for r in (0, 1)})
        # As torchrun: what is teed is marked, and nothing else.
        self.assertEqual((out, err), (["[default0]:out 0", "[default1]:out 1"],
                                      ["err 0", "err 1"]))

    def test_an_explicit_prefix_is_for_teed_lines_too(self):
        for flag, wanted in (("rank", ["[0] out 0", "[1] out 1"]), ("none", ["out 0", "out 1"])):
            self.assertEqual(self.run_logged("-t", "1", f"--line-prefix={flag}")[1], wanted)

    def test_maps(self):
        files, out, err = self.run_logged("-r", "1:3", "-t", "0:2")
        self.assertEqual(files, {"attempt_0/0/stderr.log": "err 0\n",
                                 "attempt_0/1/stdout.log": "out 1\n",
                                 "attempt_0/1/stderr.log": "err 1\n"})
        self.assertEqual((out, err), (["out 0"], ["[default0]:err 0"]))

    def test_filter_is_for_the_console(self):
        files, out, err = self.run_logged("--tee=3", "--local-ranks-filter=1")
        self.assertEqual(len(files), 4)
        self.assertEqual((out, err), (["[default1]:out 1"], ["[default1]:err 1"]))

    def test_duplicated_lines(self):
        files, _, _ = self.run_logged("-r", "1", "--duplicate-stdout-filters=loss,acc",
                                      script="echo loss $RANK; echo other; printf acc")
        self.assertEqual(sorted(files["attempt_0/filtered_stdout.log"].splitlines()),
                         ["[0] acc", "[0] loss 0", "[1] acc", "[1] loss 1"])
        self.assertEqual(files["attempt_0/1/stdout.log"], "loss 1\nother\nacc")

    def test_a_filtered_line_without_an_end_is_bounded(self):
        """A progress bar that never writes a newline must not fill the launcher's memory."""
        script = "printf loss; head -c 9000000 /dev/zero | tr '\\0' x; printf 'loss end'"
        files, _, _ = self.run_logged("-r", "1", "--duplicate-stdout-filters=loss", script=script)
        lines = files["attempt_0/filtered_stdout.log"].splitlines()
        self.assertLess(max(map(len, lines)), (4 << 20) + (128 << 10))
        self.assertEqual(sum(line.startswith("[0] loss") for line in lines), 1)
        self.assertEqual(sum(line.endswith("xloss end") for line in lines), 2)

    def test_error_lines_come_from_the_file_too(self):
        logs = os.path.join(self.dir.name, "logs")
        code, _, err = self.bash(2, 'echo output of $RANK >&2; [ $RANK = 1 ] && exit 4; sleep 300',
                                 flags=("-r", "3", f"--log-dir={logs}"))
        self.assertEqual(code, 4)
        self.assertRegex(err, r"last lines of its stderr:\n    output of 1\n")
        self.assertIn(f"logs: {logs}", err)

    def test_a_temporary_directory_is_removed_after_success_and_retained_for_a_reason(self):
        self.assertEqual(self.bash(2, "echo x", flags=("--tee=3",))[0], 0)
        self.assertEqual(os.listdir(self.tmp), [])
        self.assertEqual(self.bash(2, "exit 1")[0], 1)
        self.assertEqual(os.listdir(self.tmp), [])  # nothing in it to read
        _, _, err = self.bash(1, "echo '\"a reason\"' > $TORCHELASTIC_ERROR_FILE; exit 1")
        self.assertIn("exited with code 1: a reason\n", err)
        (left,) = os.listdir(self.tmp)  # the error file, which the report names
        self.assertIn(f"error file: {self.tmp}/{left}/", err)
        shutil.rmtree(os.path.join(self.tmp, left))
        process = self.start("--nproc-per-node=1", "--no-python", "bash", "-c",
                             "echo $$ > $NOTES/up.0; sleep 300")
        self.wait_notes("up", 1)
        process.kill()
        process.wait()
        self.wait_gone()
        self.assertEqual(os.listdir(self.tmp), [])
        _, _, err = self.bash(1, "echo x; exit 1", flags=("-r", "1"))
        (left,) = os.listdir(self.tmp)
        self.assertIn(f"logs: {self.tmp}/{left}", err)

    def test_the_next_start_sweeps_temporary_directories(self):
        def left():
            return set(os.listdir(self.tmp))

        def old(name, days):
            path = os.path.join(self.tmp, name)
            then = time.time() - days * 24 * 3600
            os.utime(path, (then, then))
            return name

        # Of a launcher that was killed with its supervisor; it goes although it is new.
        wait = "echo $$ > $NOTES/up.$RANK; sleep 300"
        killed = self.start_bash(1, wait)
        self.wait_notes("up", 1)
        (abandoned,) = left()
        with open(f"/proc/{killed.pid}/task/{killed.pid}/children") as f:
            os.kill(int(f.read().split()[0]), signal.SIGKILL)
        self.finish(killed)
        self.assertEqual(left(), {abandoned})
        # Of one that runs, however old its directory is.
        self.forget_notes()
        running = self.start_bash(1, wait)
        self.wait_notes("up", 1)
        (busy,) = left()  # the other one is gone
        self.assertNotEqual(busy, abandoned)
        # Of a run that failed: its report names the file for a day. And what is not ours.
        script = 'echo \'"message"\' > $TORCHELASTIC_ERROR_FILE; exit 1'
        kept = []
        for days in (0, 0.9, 1.1):
            self.assertEqual(self.bash(1, script)[0], 1)
            (new,) = left() - {busy, *kept}
            kept.append(old(new, days))
        for name in ("lockstep_else", "lockstep_abcdefg", "other_abcdef"):
            os.mkdir(os.path.join(self.tmp, name))
            kept.append(old(name, 9))
        os.symlink(self.notes, os.path.join(self.tmp, "lockstep_linked"))
        if os.geteuid() == 0:
            os.mkdir(os.path.join(self.tmp, "lockstep_theirs"))
            os.chown(os.path.join(self.tmp, "lockstep_theirs"), 12345, -1)
            kept.append(old("lockstep_theirs", 9))
        # Output that was asked for is the user's.
        self.assertEqual(self.bash(1, "echo output", flags=("--redirects=1",))[0], 0)
        (stored,) = left() - {busy, "lockstep_linked", *kept}
        kept.append(old(stored, 9))
        self.assertEqual(self.bash(1, "true")[0], 0)
        swept = kept.pop(2)
        self.assertEqual(left(), {busy, "lockstep_linked", *kept}, swept)
        running.terminate()
        self.assertEqual(self.finish(running)[0], 143)
        self.assertEqual(left(), {"lockstep_linked", *kept})

    def test_redirected_output_is_retained_and_its_place_is_named(self):
        code, out, err = self.bash(1, "echo x", flags=("-r", "1"))
        self.assertEqual((code, out), (0, ""))
        place = re.search(r"the ranks' output is stored in (\S+); --log-dir=DIR", err)[1]
        with open(os.path.join(place, "0", "stdout.log"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "x\n")

    def test_a_relative_log_dir_is_absolute_for_the_ranks(self):
        process = self.start("--nproc-per-node=1", "--log-dir=logs", "--no-python", "bash", "-c",
                             "cd /; echo '\"found me\"' > $TORCHELASTIC_ERROR_FILE; exit 1",
                             cwd=self.dir.name)
        _, _, err = self.finish(process)
        self.assertIn("found me", err)

    def test_an_invalid_log_dir_is_refused(self):
        code, _, err = self.bash(1, "echo ran", flags=("--log-dir=/dev/null/logs",))
        self.assertEqual(code, 2, err)
        self.assertIn("--log-dir=/dev/null/logs cannot be used", err)


class Flood(Case):
    """Measured: the tests run it alone."""

    def test_a_flood_is_complete_and_blocks_nobody(self):
        # 100 MB from rank 0 through the pump; meanwhile rank 1's lines are not late.
        program = os.path.join(self.dir.name, "flood.py")
        with open(program, "w") as f:
            f.write(r'''
import hashlib, os, sys, time
if os.environ["RANK"] == "0":
    digest, sent = hashlib.sha256(), 0
    block = b"".join(b"%07d the quick brown fox and the lazy dog\n" % i for i in range(20000))
    while sent < 100_000_000:
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(1, rest):]
        digest.update(block)
        sent += len(block)
    with open(os.path.join(os.environ["NOTES"], "digest"), "w") as f:
        f.write(f"{sent} {digest.hexdigest()}")
else:
    worst = 0
    for i in range(40):
        began = time.monotonic()
        print("tick", i, flush=True)
        worst = max(worst, time.monotonic() - began)
        time.sleep(0.02)
    with open(os.path.join(os.environ["NOTES"], "worst"), "w") as f:
        f.write(str(worst))
''')
        logs = os.path.join(self.dir.name, "logs")
        for flags, target in ((("--tee=3",), os.devnull), (("--redirects=3",), None)):
            with self.subTest(flags):
                worst_s = []
                # One of some: a machine that holds up rank 1 itself makes its lines late as well.
                while not worst_s or (min(worst_s) >= 1 and len(worst_s) < 5):
                    worst_s.append(self.flood(program, logs, flags, target))
                self.assertLess(min(worst_s), 1)

    def flood(self, program, logs, flags, target):
        """Checks that it is complete; the longest that a line of rank 1 took, in seconds."""
        logs = os.path.join(logs, str(time.monotonic_ns()))
        with open(target, "w") if target else contextlib.nullcontext(subprocess.PIPE) as stdout:
            process = self.start("--nproc-per-node=2", f"--log-dir={logs}", "--rdzv-id=x", *flags,
                                 program, stdout=stdout)
        self.assertEqual(process.wait(2 * BOUND_S), 0)
        with open(os.path.join(self.notes, "digest")) as f:
            size, digest = f.read().split()
        with open(self.log(logs, 0, "stdout.log"), "rb") as f:
            data = f.read()
        self.assertEqual(len(data), int(size))
        self.assertEqual(hashlib.sha256(data).hexdigest(), digest)
        with open(os.path.join(self.notes, "worst")) as f:
            return float(f.read())


if __name__ == "__main__":
    unittest.main(verbosity=1)

"""The supervisor with real processes: how runs end, what is reported, and that nothing is left."""
import contextlib
import json
import os
import re
import signal
import subprocess
import time
import unittest

from launch_case import BOUND_S, SOAK, WAITS, Case, marked


class Failures(Case):
    def test_every_way_to_die_on_every_rank(self):
        expected = {
            "exception": (1, "exited with code 1"),
            "exit3": (3, "exited with code 3"),
            "abort": (128 + signal.SIGABRT, "killed by SIGABRT"),
            "segv": (128 + signal.SIGSEGV, "killed by SIGSEGV"),
            "trap": (128 + signal.SIGTRAP, "killed by SIGTRAP"),
            "sys": (128 + signal.SIGSYS, "killed by SIGSYS"),
            "kill9": (128 + signal.SIGKILL, "killed by SIGKILL"),
        }
        for mode, (code, cause) in expected.items():
            for rank in range(3) if SOAK or mode == "kill9" else (1,):
                with self.subTest(mode=mode, rank=rank):
                    self.forget_notes()
                    got, _, err = self.run_ranks(3, self.worker, mode, str(rank))
                    self.assertEqual(got, code, err)
                    pid = self.wait_notes("up", 3)[rank]
                    host = os.uname().nodename
                    self.assertIn(f"rank {rank} on {host} failed: {cause}", err)
                    self.assertIn(f"(local rank {rank}, pid {pid}, host {host})", err)
                    self.assertRegex(err, rf"last lines of its stderr:\n    last output of {rank}")
                    if mode == "exception":
                        self.assertIn("    RuntimeError: boom", err)
                    self.assertEqual(self.wait_gone(), [])

    # As lockstep::run() does while its body runs.
    INSIDE = 'touch $TORCHELASTIC_ERROR_FILE.inside; '

    def test_a_rank_that_leaves_its_world_is_the_cause(self):
        for interval in ("0.3", "2"):
            with self.subTest(interval=interval):
                began = time.monotonic()
                code, _, err = self.bash(3, self.INSIDE + 'if [ $RANK = 1 ]; then exit 0; fi; '
                                         'sleep 300', flags=(f"--monitor-interval={interval}",))
                self.assertEqual(code, 1, err)
                self.assertRegex(err, r"\[launch\] rank 1 on \S+ failed: exited with code 0 in the "
                                      r"middle of the world\. Its process ended inside the body of "
                                      r"lockstep::run\(\)")
                self.assertGreater(time.monotonic() - began, float(interval))

    def test_a_rank_that_misses_its_peer_fails_after_it(self):
        code, _, err = self.bash(
            3, WAITS + self.INSIDE + 'echo $$ > $NOTES/up.$RANK; '
            'if [ $RANK = 1 ]; then exit 0; fi; '
            'if [ $RANK = 2 ]; then until_gone up.1; printf \'"Connection closed %0600d. Look at '
            'rank 1."\' 0 > $TORCHELASTIC_ERROR_FILE; exit 9; fi; sleep 300',
            flags=("--monitor-interval=60",))
        self.assertEqual(code, 1, err)
        self.assertRegex(err, r"\[launch\] rank 1 on \S+ failed: exited with code 0 in the middle")
        self.assertRegex(err, r"failed after it:\n    rank 2 with exit code 9, \S+ s later: "
                              r"Connection closed 0{600}\. Look at rank 1\.\n")

    def test_ranks_that_all_leave_have_ended(self):
        code, _, err = self.bash(3, self.INSIDE + 'sleep 0.$RANK; exit 0',
                                 flags=("--monitor-interval=30",))
        self.assertEqual((code, err), (0, ""))

    def test_a_rank_that_had_ended_before_is_mentioned(self):
        code, _, err = self.bash(3, WAITS + 'if [ $RANK = 0 ]; then echo $$ > $NOTES/up.0; exit 0; '
                                 'fi; if [ $RANK = 2 ]; then until_gone up.0; exit 4; fi; '
                                 'sleep 300')
        self.assertEqual(code, 4, err)
        self.assertIn("\n  rank 0 had ended with exit code 0 before\n", err)

    def test_survivors_get_the_cause_before_sigterm(self):
        script = WAITS + (
            'if [ $RANK = 1 ]; then until_notes up.0 up.2; exit 7; fi; trap "" TERM; '
            'echo $$ > $NOTES/up.$RANK; read -u $LOCKSTEP_CONTROL_FD line; echo "heard $line"')
        code, out, err = self.bash(3, script)
        self.assertEqual(code, 7, err)
        for rank in (0, 2):
            line = re.search(rf"\[{rank}\] heard (.*)", out).group(1)
            self.assertEqual(json.loads(line), {"failed": {
                "rank": 1, "host": os.uname().nodename, "cause": "exited with code 7"}})

    def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(self):
        began = time.monotonic()
        code, _, err = self.bash(
            2, WAITS + 'if [ $RANK = 1 ]; then until_notes up.0; exit 4; fi; '
            'trap "" TERM; echo $$ > $NOTES/up.0; while :; do sleep 0.1; done',
            flags=("--shutdown-timeout=1",))
        self.assertEqual(code, 4)
        self.assertIn("sending SIGKILL", err)
        self.assertIn("waiting for the other ranks to end", err)
        self.assertGreater(time.monotonic() - began, 1)

    def test_a_rank_that_ends_early_is_not_a_failure(self):
        code, out, _ = self.bash(2, 'if [ $RANK = 0 ]; then exit 0; fi; sleep 0.4; echo done')
        self.assertEqual(code, 0)
        self.assertIn("[1] done", out)

    def test_the_report_names_program_error_file_and_who_else_failed(self):
        logs = os.path.join(self.dir.name, "logs")
        script = WAITS + (
            'echo $$ > $NOTES/up.$RANK; until_notes up.0 up.1 up.2; '
            'case $RANK in 0) sleep 300;; 1) echo \'"first message"\' > $TORCHELASTIC_ERROR_FILE; '
            'exit 5;; 2) until_gone up.1; exit 6;; esac')
        code, _, err = self.bash(3, script, flags=(f"--log-dir={logs}",))
        self.assertEqual(code, 5, err)
        self.assertRegex(err, r"\n  program: \S*bash -c '.*until_notes")
        self.assertIn(f"\n  error file: {self.log(logs, 1, 'error.json')}\n", err)
        self.assertRegex(err, r"failed after it:\n    rank 2 with exit code 6, \S+ s later\n"
                              r"  ended because of it:\n    rank 0 killed by SIGTERM\n")

    def test_how_each_rank_ended_is_in_the_report(self):
        """Also those that were asked to end, or say themselves that another one failed first."""
        consequence = ('{"message": {"message": "lost it", "extraInfo": '
                       '{"timestamp": "%s", "consequence": true}}}')
        script = WAITS + (
            'trap "exit 17" TERM; echo $$ > $NOTES/up.$RANK; until_notes up.0 up.1 up.2 up.3 up.4; '
            'case $RANK in 1) exit 5;; 2) until_gone up.1; exit 6;; 3) until_gone up.1; '
            f"printf '{consequence}' $(date +%s) > $TORCHELASTIC_ERROR_FILE; exit 7;; esac; "
            'while :; do sleep 0.05; done')
        code, _, err = self.bash(5, script, flags=("--shutdown-timeout=60",))
        self.assertEqual(code, 5, err)
        self.assertRegex(err, r"rank 1 on \S+ failed: exited with code 5\n")
        self.assertRegex(err, r"\n  rank 1 \(.*\), .* attempt 0, with exit code 5\n")
        # A busy launcher may ask rank 2 to end before it does so by itself.
        self.assertRegex(err, r"\n    (rank 2|ranks 2, 3|ranks 0, 2, 4) with exit code \d+")
        self.assertRegex(err, r"\n  ended because of it:\n(    .*\n)*"
                              r"    ranks 0,( 2,)?( 3,)? 4 with exit code 17\n")
        self.assertRegex(err, r"\n    rank 3 with exit code 7\n|ranks 0,( 2,)? 3, 4 with")

    def test_the_error_file_that_is_named_is_there(self):
        _, _, err = self.bash(1, "echo '\"message\"' > $TORCHELASTIC_ERROR_FILE; exit 1")
        (path,) = re.findall(r"\n  error file: (.*)\n", err)
        with open(path) as f:
            self.assertEqual(f.read(), '"message"\n')
        self.assertNotIn("error file", self.bash(1, "exit 1")[2])
        (left,) = os.listdir(self.tmp)  # of the first run alone
        self.assertIn(left, path)

    def test_a_temporary_directory_that_cannot_be_written_is_named(self):
        code, _, err = self.bash(1, "true", env={"TMPDIR": "/proc"})
        self.assertEqual(code, 2, err)
        self.assertRegex(err, r"\[launch\] the temporary directory /proc/lockstep_\w+ cannot be "
                              r"created: .+\. Set TMPDIR to a directory you may write, or name one "
                              r"with --log-dir=DIR\.\n")

    def test_a_program_that_cannot_be_executed(self):
        path = os.path.join(self.dir.name, "broken")
        with open(path, "w") as f:
            f.write("#!/no/such/interpreter\n")
        os.chmod(path, 0o755)
        code, _, err = self.run_ranks(2, path, flags=("--no-python", "--max-restarts=5"))
        self.assertEqual(code, 126, err)
        self.assertIn("cannot execute", err)
        self.assertNotIn("restarting", err)


class Stopped(Case):
    def test_a_stopped_rank_is_named_and_waited_for(self):
        process = self.start("--standalone", "--nproc-per-node=2", self.worker, "stop", "1",
                             env={"SHORT": 1})
        self.wait_line(process.stderr, "was stopped by SIGSTOP")
        pid = self.wait_notes("up", 2)[1]
        time.sleep(2)  # the other one has ended
        self.assertIsNone(process.poll())
        os.kill(pid, signal.SIGCONT)
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertRegex(err, rf"\[launch\] rank 1 \(pid {pid}\) on \S+ was stopped by SIGSTOP\. "
                         rf"Continue it with: kill -CONT {pid}\n")
        self.assertEqual(err.count("[launch] rank 1 continues."), 1, err)

    def test_a_stopped_rank_ends_with_the_others(self):
        process = self.start("--standalone", "--nproc-per-node=2", self.worker, "stop", "1")
        self.wait_line(process.stderr, "was stopped by SIGSTOP")
        process.send_signal(signal.SIGTERM)
        code, _, err = self.finish(process)
        self.assertEqual(code, 143, err)


HIDE_PROC = ("unshare", "--map-root-user", "--mount", "bash", "-c",
             'mount -t tmpfs none /proc || exit 99; exec "$@"', "bash")
CAN_HIDE_PROC = subprocess.run([*HIDE_PROC, "true"], capture_output=True).returncode == 0


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(child) for child in f.read().split()]


def child_of(pid):
    """The one child of a launcher's front."""
    (child,) = children_of(pid)
    return child


def argv_of(pid):
    """Its command line; nothing where it has just ended."""
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            return f.read().split("\0")[:-1]
    except OSError:
        return []


class NothingIsLeft(Case):
    # A rank, a child in its group, one in its session, a daemon in its own session, and children of
    # a rank that has ended.
    SCRIPT = (
        'echo $$ > $NOTES/up.$RANK; '
        'if [ $RANK = 1 ]; then sleep 301 & exit 0; fi; '
        'setsid bash -c "sleep 302 & sleep 303 & echo \\$! > $NOTES/daemon.0; wait" & '
        'bash -c "set -m; sleep 304 & wait" & sleep 305 & wait')

    def begin(self):
        process = self.start_bash(2, self.SCRIPT)
        self.wait_notes("up", 2)
        self.wait_notes("daemon", 1)
        end = time.monotonic() + BOUND_S
        wanted = {str(number) for number in range(301, 306)}
        while wanted - {argv[-1] for pid in marked(self.marker) if (argv := argv_of(pid))}:
            self.assertLess(time.monotonic(), end, "not all of them are there")
            time.sleep(0.02)
        return process

    def test_after_the_launcher_is_killed(self):
        process = self.begin()
        process.kill()
        process.wait()
        self.assertEqual(self.wait_gone(), [])

    def test_after_the_supervising_child_is_killed(self):
        process = self.begin()
        os.kill(child_of(process.pid), signal.SIGKILL)
        code, _, err = self.finish(process)
        self.assertEqual(code, 137)
        self.assertIn("the supervising process was killed by SIGKILL", err)
        self.assertIn("its ranks and what they had started were killed too.", err)
        self.assertEqual(marked(self.marker), [])

    def test_children_from_before_the_launcher_outlive_a_killed_supervisor(self):
        """Children of a shell that becomes the launcher, or of a program that calls spawn()."""
        process = self.start(
            "--standalone", "--nproc-per-node=1", "--no-python", "bash", "-c",
            "echo $$ > $NOTES/up.$RANK; sleep 301",
            prefix=("bash", "-c", 'setsid sleep 306 >/dev/null 2>&1 & echo $! > $NOTES/own.0; '
                    'exec "$@"', "bash"))
        self.wait_notes("up", 1)
        own = self.wait_notes("own", 1)[0]
        children = [pid for pid in children_of(process.pid) if pid != own]
        self.assertEqual(len(children), 1)
        os.kill(children[0], signal.SIGKILL)
        code, _, err = self.finish(process)
        self.assertEqual(code, 137)
        self.assertEqual(marked(self.marker), [own])
        os.kill(own, signal.SIGKILL)

    @unittest.skipUnless(CAN_HIDE_PROC, "needs a mount namespace")
    @unittest.skipIf("SANITIZED" in os.environ, "the search for leaks needs /proc")
    def test_without_proc_the_launcher_says_what_it_cannot_do(self):
        process = self.start_bash(
            1, 'setsid bash -c \'trap "" TERM; echo $$ > $NOTES/daemon.0; while :; do sleep 1; '
            'done\' & while [ ! -s $NOTES/daemon.0 ]; do sleep 0.05; done', prefix=HIDE_PROC)
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertIn("[launch] what the ranks have started is left behind: without /proc it is "
                      "not found. Mount /proc where the launcher runs.", err)
        for pid in marked(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def test_after_a_stop_request(self):
        process = self.begin()
        process.terminate()
        code, _, _ = self.finish(process)
        self.assertEqual(code, 143)
        self.assertEqual(marked(self.marker), [])

    def test_after_a_failure(self):
        process = self.begin()
        os.kill(self.wait_notes("up", 2)[0], signal.SIGKILL)
        code, _, err = self.finish(process)
        self.assertEqual(code, 137, err)
        self.assertEqual(marked(self.marker), [])

    def test_after_a_success(self):
        code, _, err = self.bash(
            2, 'sleep 301 & setsid sleep 302 & (trap "" TERM; sleep 303) & exit 0')
        self.assertEqual(code, 0, err)
        self.assertEqual(marked(self.marker), [])

    def test_unrelated_processes_are_not_touched(self):
        unrelated = subprocess.Popen(["sleep", "300"], start_new_session=True)
        try:
            self.assertEqual(self.bash(2, "exit 9")[0], 9)
            self.assertIsNone(unrelated.poll())
        finally:
            unrelated.kill()
            unrelated.wait()


class StopRequests(Case):
    CATCH = (
        'trap "echo caught $SIG; [ -n \\"$SAVE\\" ] && sleep $SAVE; exit 0" $SIG; '
        'echo $$ > $NOTES/up.$RANK; while :; do sleep 0.05; done')

    def request(self, number, name, **env):
        process = self.start_bash(2, self.CATCH, "--max-restarts=3", env={"SIG": name, **env})
        self.wait_notes("up", 2)
        process.send_signal(number)
        return process

    def test_codes(self):
        for number, name, code in ((signal.SIGTERM, "TERM", 143), (signal.SIGINT, "INT", 130),
                                   (signal.SIGHUP, "HUP", 129), (signal.SIGQUIT, "QUIT", 131)):
            with self.subTest(name):
                self.forget_notes()
                got, out, err = self.finish(self.request(number, name))
                self.assertEqual(got, code, err)
                self.assertEqual(sorted(out.splitlines()[:2]),
                                 [f"[0] caught {name}", f"[1] caught {name}"])
                self.assertNotIn("failed", err)
                self.assertNotIn("restarting", err)

    def test_failing_after_a_stop_request_is_not_a_failure(self):
        process = self.start_bash(2, 'echo $$ > $NOTES/up.$RANK; sleep 300', "--max-restarts=3")
        self.wait_notes("up", 2)
        process.terminate()
        code, _, err = self.finish(process)
        self.assertEqual(code, 143)
        self.assertNotIn("failed", err)

    def test_a_rank_that_fails_in_its_stop_gives_its_code_and_a_report(self):
        # 143 promises that the request was handled; a rank whose save failed says otherwise.
        script = ('trap "echo no room on the disk >&2; exit $CODE" TERM HUP INT; '
                  'trap "exit 143" TERM; [ $RANK = 1 ] && '
                  'trap "echo no room on the disk >&2; exit $CODE" TERM; '
                  'echo $$ > $NOTES/up.$RANK; while :; do sleep 0.05; done')
        for number, code, wanted in ((signal.SIGTERM, 3, 3), (signal.SIGTERM, 143, 143),
                                     (signal.SIGHUP, 129, 129), (signal.SIGINT, 1, 130)):
            with self.subTest(number=number, code=code):
                self.forget_notes()
                process = self.start_bash(2, script, "--max-restarts=3", env={"CODE": code})
                self.wait_notes("up", 2)
                process.send_signal(number)
                got, _, err = self.finish(process)
                self.assertEqual(got, wanted, err)
                self.assertNotIn("restarting", err)
                if wanted != 3:
                    self.assertNotIn("failed", err)
                    continue
                self.assertRegex(err, r"rank 1 on \S+ failed: exited with code 3 when it was asked "
                                 r"to stop \(SIGTERM\)")
                self.assertRegex(err, r"(?m)^ +no room on the disk")

    def test_a_rank_that_fails_because_of_another_in_a_stop_is_not_the_cause(self):
        """Rank 0 loses its peer and ends with 1: to the request itself, or to a crash."""
        script = WAITS + (
            'trap "until_gone up.1; exit 1" TERM; [ $RANK = 1 ] && trap "$HOW" TERM; '
            'echo $$ > $NOTES/up.$RANK; while :; do sleep 0.05; done')
        for how, wanted in (("trap - TERM; kill -TERM $$", 143), ("kill -SEGV $$", 139)):
            with self.subTest(how):
                self.forget_notes()
                process = self.start_bash(2, script, env={"HOW": how})
                self.wait_notes("up", 2)
                process.send_signal(signal.SIGTERM)
                got, _, err = self.finish(process)
                self.assertEqual(got, wanted, err)
                self.assertEqual("rank 1 on " in err and "SIGSEGV" in err, wanted == 139, err)

    def test_a_background_shell_job_gets_sigint(self):
        # A shell without job control ignores SIGINT in what it puts into the background.
        process = self.start_bash(2, self.CATCH, env={"SIG": "INT"},
                                  prefix=("bash", "-c", "trap '' INT; exec \"$@\"", "bash"))
        self.wait_notes("up", 2)
        process.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(process)[0], 130)

    def test_sighup_that_is_ignored_stays_ignored(self):
        process = self.start_bash(1, 'echo $$ > $NOTES/up.$RANK; kill -HUP $$; sleep 1; echo fine',
                                  prefix=("nohup",))
        self.wait_notes("up", 1)
        process.send_signal(signal.SIGHUP)
        code, out, err = self.finish(process)
        self.assertEqual((code, out), (0, "fine\n"), err)

    COUNT = 'n=0; trap "n=\\$((n+1)); echo request \\$n" TERM; echo $$ > $NOTES/up.$RANK; '

    def ask_again(self, process, times):
        """Requests, and after each of `times` that both ranks have felt another one."""
        process.terminate()
        for number in range(1, times + 1):
            self.wait_line(process.stdout, *(f"[{rank}] request {number}\n" for rank in (0, 1)))
            time.sleep(0.2)  # the same request within 100 ms is an echo of itself
            self.assertIsNone(process.poll())
            process.terminate()

    def test_a_second_request_is_forwarded_and_leaves_no_orphans(self):
        process = self.start_bash(2, self.COUNT + 'while [ $n -lt 2 ]; do sleep 0.05; done')
        self.wait_notes("up", 2)
        self.ask_again(process, 1)
        code, out, _ = self.finish(process)
        self.assertEqual(code, 143)
        for rank in (0, 1):
            self.assertIn(f"[{rank}] request 1\n", out)
            self.assertIn(f"[{rank}] request 2\n", out)

    def test_a_child_that_outlives_its_shell_is_asked_once_and_has_the_grace(self):
        # The shell dies of SIGTERM at once; its child, the real program, is saving.
        process = self.start_bash(1, '(n=0; trap "n=\\$((n+1))" TERM; echo $BASHPID > $NOTES/up.0; '
                                  'while [ $n = 0 ]; do sleep 0.05; done; sleep 1.5; '
                                  'echo saved after $n) & wait')
        self.wait_notes("up", 1)
        process.terminate()
        code, out, err = self.finish(process)
        self.assertEqual((code, out), (143, "saved after 1\n"), err)

    def test_the_third_request_kills(self):
        process = self.start_bash(2, self.COUNT + 'while :; do sleep 0.05; done')
        self.wait_notes("up", 2)
        self.ask_again(process, 2)
        code, _, err = self.finish(process)
        self.assertEqual(code, 143)
        self.assertIn("third request", err)
        self.assertNotIn("after SIGTERM some ranks are still there", err)

    def test_handled_signals_are_the_callers_choice(self):
        process = self.start_bash(1, self.CATCH, "--signals-to-handle=SIGUSR1", env={"SIG": "USR1"})
        self.wait_notes("up", 1)
        process.send_signal(signal.SIGUSR1)
        code, out, _ = self.finish(process)
        self.assertEqual((code, out), (128 + signal.SIGUSR1, "caught USR1\n"))

    def test_sigusr1_and_sigusr2_are_forwarded_and_stop_nothing(self):
        script = ('trap "echo felt USR1" USR1; trap "echo felt USR2; exit 143" USR2; '
                  'echo $$ > $NOTES/up.$RANK; while :; do sleep 0.05; done')
        # Also where the list of requests does not name them.
        for flags in ((), ("--signals-to-handle=SIGTERM",)):
            with self.subTest(flags):
                self.forget_notes()
                process = self.start_bash(2, script, "--max-restarts=3", "--shutdown-timeout=0.5",
                                          *flags)
                self.wait_notes("up", 2)
                process.send_signal(signal.SIGUSR1)
                self.wait_line(process.stdout, "[0] felt USR1\n", "[1] felt USR1\n")
                time.sleep(1)  # longer than the grace that a request has
                self.assertIsNone(process.poll())
                process.send_signal(signal.SIGUSR2)
                code, out, err = self.finish(process)
                self.assertEqual(code, 143, err)
                self.assertIn("felt USR2", out)
                self.assertNotIn("restarting", err)
                self.assertRegex(err, r"rank \d on \S+ stopped on request: exited with code 143\n")

    def test_a_rank_that_saves_longer_is_not_cut_short(self):
        # Rank 1 ends at once; rank 0, which SIGTERM would kill, is not asked a second time.
        script = ('trap "[ $RANK = 0 ] && sleep 1 && echo saved; exit 143" USR1; '
                  'echo $$ > $NOTES/up.$RANK; while :; do sleep 0.05; done')
        process = self.start_bash(2, script)
        self.wait_notes("up", 2)
        process.send_signal(signal.SIGUSR1)
        code, out, err = self.finish(process)
        self.assertEqual((code, out), (143, "[0] saved\n"), err)

    def test_a_forwarded_signal_does_not_end_ranks_that_do_not_handle_it(self):
        # A shell around the program does not handle it, the program does; rank 1 has no program.
        program = ('trap "echo saved; exit 143" USR1; echo $BASHPID > $NOTES/up.0; '
                   'while :; do sleep 0.05; done')
        script = (f"if [ $RANK = 0 ]; then bash -c '{program}'; exit $?; fi; "
                  'echo $$ > $NOTES/up.1; sleep 300; exit 1')
        process = self.start_bash(2, script, "--shutdown-timeout=2")
        pids = self.wait_notes("up", 2)
        process.send_signal(signal.SIGUSR1)
        code, out, err = self.finish(process)
        self.assertEqual(code, 143, err)
        self.assertIn("[0] saved\n", out)
        self.assertIn(f"[launch] SIGUSR1 is not forwarded to rank 1 (pid {pids[1]}): it does not "
                      "handle that signal", err)
        self.assertNotIn("SIGUSR1 is not forwarded to rank 0", err)

    def test_other_signals_end_nothing(self):
        process = self.start_bash(1, 'echo $$ > $NOTES/up.$RANK; '
                                  'while [ ! -e $NOTES/go ]; do sleep 0.05; done; echo fine')
        self.wait_notes("up", 1)
        for number in (signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGUSR1,
                       signal.SIGUSR2):
            process.send_signal(number)
        self.wait_line(process.stderr, "SIGUSR1 is not forwarded", "SIGUSR2 is not forwarded")
        with open(os.path.join(self.notes, "go"), "w"):
            pass
        code, out, err = self.finish(process)
        self.assertEqual((code, out), (0, "fine\n"), err)


class Restarts(Case):
    SCRIPT = WAITS + (
        'k=$TORCHELASTIC_RESTART_COUNT; '
        'echo "attempt $k port $MASTER_PORT max $TORCHELASTIC_MAX_RESTARTS"; '
        'echo $$ > $NOTES/said_$k.$RANK; '
        '[ $RANK = 0 ] && [ $k -lt $GOOD ] && until_notes said_$k.1 && exit 5; sleep 0.3')

    def test_the_whole_group_is_restarted_with_a_fresh_port(self):
        logs = os.path.join(self.dir.name, "logs")
        code, out, err = self.bash(2, self.SCRIPT, env={"GOOD": 2},
                                   flags=("--max-restarts=3", f"--log-dir={logs}", "--tee=3",
                                          "--rdzv-id=job7"))
        self.assertEqual(code, 0, err)
        for rank in (0, 1):
            lines = re.findall(rf"\[default{rank}\]:attempt (\d) port (\d+) max 3", out)
            self.assertEqual([a for a, _ in lines], ["0", "1", "2"])
            self.assertEqual(len({port for _, port in lines}), 3)
        self.assertIn("restarting all ranks (1 of 3) in 0.5 s", err)
        self.assertIn("restarting all ranks (2 of 3) in 1.0 s", err)
        run = next(n for n in os.listdir(logs))
        for attempt in range(3):
            for rank in range(2):
                with open(f"{logs}/{run}/attempt_{attempt}/{rank}/stdout.log") as f:
                    self.assertIn(f"attempt {attempt} port", f.read())

    def test_it_gives_up(self):
        code, out, err = self.bash(2, self.SCRIPT, env={"GOOD": 9}, flags=("--max-restarts=1",))
        self.assertEqual(code, 5)
        self.assertEqual(out.count("[0] attempt"), 2)
        # The reports; where the other rank takes long to end, a line before it says so too.
        self.assertEqual(len(re.findall(r"rank 0 on \S+ failed: exited with code 5\n", err)), 2)

    def test_a_stop_on_request_and_a_usage_error_are_not_restarted(self):
        script = WAITS + (
            'trap "exit $CODE" TERM; echo $$ > $NOTES/up_$TORCHELASTIC_RESTART_COUNT.$RANK; '
            '[ $RANK = 1 ] && [ -z "$WAIT" ] && until_notes up_0.0 && exit $CODE; '
            'while :; do sleep 0.05; done')
        for wanted, wait in ((2, ""), (143, ""), (143, "1")):
            with self.subTest(code=wanted, wait=wait):
                self.forget_notes()
                process = self.start_bash(2, script, "--max-restarts=3",
                                          env={"CODE": wanted, "WAIT": wait})
                if wait:  # somebody signals one rank
                    os.kill(self.wait_notes("up_0", 2)[1], signal.SIGTERM)
                code, _, err = self.finish(process)
                self.assertEqual(code, wanted, err)
                self.assertNotIn("restarting", err)
                how = "failed" if wanted == 2 else "stopped on request"
                self.assertRegex(err, rf"rank 1 on \S+ {how}: exited with code {wanted}\n")

    def test_a_rank_that_a_signal_killed_is_restarted(self):
        script = ('[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; kill -$SIG $$; sleep 300')
        for name in ("KILL", "TERM"):
            code, _, err = self.bash(1, script, flags=("--max-restarts=1",), env={"SIG": name})
            self.assertEqual(code, 0, err)
            self.assertIn("restarting all ranks (1 of 1)", err)

    def test_the_rank_that_was_signalled_is_named(self):
        # All ranks end with 143 together; the one that was signalled has written why.
        script = WAITS + (
            'say() { printf \'{"message": {"message": "stopped by SIGTERM", "extraInfo": '
            '{"timestamp": "%s"}}}\' $(date +%s) > $TORCHELASTIC_ERROR_FILE; }; '
            'trap "say; touch $NOTES/stop" TERM; '
            'echo $$ > $NOTES/up.$RANK; while [ ! -e $NOTES/stop ]; do sleep 0.05; done; '
            '[ $RANK = 1 ] && until_gone up.0; exit 143')
        process = self.start_bash(3, script, "--max-restarts=3")
        os.kill(self.wait_notes("up", 3)[1], signal.SIGTERM)
        code, _, err = self.finish(process)
        self.assertEqual(code, 143, err)
        self.assertRegex(err, r"rank 1 on \S+ stopped on request: exited with code 143: "
                              r"stopped by SIGTERM\n")
        self.assertNotIn("failed after it", err)
        self.assertNotIn("restarting", err)

    def test_a_stop_request_ends_the_pause(self):
        script = ('k=$TORCHELASTIC_RESTART_COUNT; echo $$ > $NOTES/up.$k; [ $k -lt 3 ] && exit 6; '
                  'sleep 300')
        for _ in range(5):
            self.forget_notes()
            process = self.start_bash(1, script, "--max-restarts=9")
            # The launcher's message shows that the pause has begun; a rank's note would come before
            # the rank fails, and a stop in which a rank fails ends with that rank's code.
            self.wait_line(process.stderr, "restarting all ranks (3 of 9) in 2.0 s")
            process.terminate()
            code, _, err = self.finish(process)
            self.assertEqual(code, 143, err)
            if len(self.wait_notes("up", 3)) == 3:
                return
        self.fail("the pause was over before the stop, five times")


class ErrorFiles(Case):
    def test_torchruns_forms(self):
        forms = {
            '{"message": {"message": "Bad: thing", "extraInfo": '
            '{"py_callstack": "Trace\\n  line 7", "timestamp": "1"}}}': ["Bad: thing", "  line 7"],
            '{"message": "plain text", "timestamp": 12}': ["plain text"],
            '"a bare string"': ["a bare string"],
            '{"message": {"message": "from C++", "extraInfo": {"cpp_stack": ["f() at a.cpp:3"]}}}':
                ["from C++", "f() at a.cpp:3"],
            'not JSON at all': ["not JSON at all", "its error file is not valid JSON"],
            '{"something": "else"}': ["something", 'has no field "message"'],
            '[1, {"a": "\\ud800"}': ["not valid JSON"],
        }
        for text, wanted in forms.items():
            with self.subTest(text):
                own = os.path.join(self.dir.name, "own.json")
                code, _, err = self.bash(
                    2, '[ $RANK = 0 ] && sleep 300; '
                    'printf "%s" "$TEXT" > $TORCHELASTIC_ERROR_FILE; exit 8',
                    env={"TEXT": text, "TORCHELASTIC_ERROR_FILE": own})
                self.assertEqual(code, 8, err)
                self.assertIn("rank 1 on", err)
                for message in wanted:
                    self.assertIn(message, err)
                with open(own) as f:
                    copy = json.load(f)
                self.assertIn("message", copy)
                if text.startswith('{"message": {'):
                    self.assertEqual(copy["message"].pop("errorCode"), 8)
                    self.assertEqual(copy, json.loads(text))

    def test_without_an_error_file_the_launcher_writes_its_own(self):
        own = os.path.join(self.dir.name, "own.json")
        self.assertEqual(self.bash(1, "kill -9 $$", env={"TORCHELASTIC_ERROR_FILE": own})[0], 137)
        with open(own) as f:
            message = json.load(f)["message"]
        self.assertEqual(message["errorCode"], 137)
        self.assertIn("killed by SIGKILL", message["message"])

    def test_the_first_cause_is_named_though_it_dies_last(self):
        # Rank 1 fails and needs a moment to end; rank 0 is its victim and is gone at once.
        script = WAITS + (
            'say() { printf \'{"message": {"message": "%s", "extraInfo": {"timestamp": "%s"}}}\' '
            '"$1" $(date +%s) > $TORCHELASTIC_ERROR_FILE; echo $$ > $NOTES/said.$RANK; }; '
            'if [ $RANK = 1 ]; then say cause; until_gone said.0; exit 9; fi; '
            'until_notes said.1; say victim; exit 1')
        for _ in range(5):
            self.forget_notes()
            code, _, err = self.bash(2, script)
            # It has a second for that moment, which a busy machine may take away.
            if "reported an error and was stopped" not in err:
                break
        self.assertEqual(code, 9, err)
        self.assertRegex(err.split("\n")[0], r"rank 1 on .*: cause$")
        self.assertRegex(err, r"failed after it:\n    rank 0 with exit code 1, .* later: victim")

    def test_a_killed_rank_is_the_cause_though_its_victim_writes_a_file_in_the_same_second(self):
        script = WAITS + (
            'echo $$ > $NOTES/up.$RANK; if [ $RANK = 1 ]; then exec sleep 300; fi; '
            'until_notes up.1; while [ -e /proc/$(cat $NOTES/up.1) ]; do :; done; '
            'printf \'{"message": {"message": "lost", "extraInfo": {"timestamp": "%s"}}}\' '
            '$(date +%s) > $TORCHELASTIC_ERROR_FILE; exit 1')
        process = self.start_bash(2, script)
        os.kill(self.wait_notes("up", 2)[1], signal.SIGKILL)
        code, _, err = self.finish(process)
        self.assertEqual(code, 137, err)
        self.assertIn("rank 1 on", err)

    def test_a_stale_error_file_is_ignored(self):
        logs = os.path.join(self.dir.name, "logs")
        flags = (f"--log-dir={logs}", "--rdzv-id=again", "--rdzv-backend=static", "--no-python")
        script = '[ -n "$OLD" ] && echo \'"old message"\' > $TORCHELASTIC_ERROR_FILE; exit 2'
        for old in ("1", ""):
            process = self.start("--nproc-per-node=1", *flags, "bash", "-c", script,
                                 env={"OLD": old})
            code, _, err = self.finish(process)
            self.assertEqual(code, 2)
            self.assertEqual("exited with code 2: old message\n" in err, bool(old), err)


class Surroundings(Case):
    def test_a_launcher_inside_a_launcher(self):
        process = self.start(
            "--standalone", "--nproc-per-node=2", "--no-python", self.launcher(), "run",
            "--standalone", "--nproc-per-node=2", "--no-python", "bash", "-c",
            'n=0; trap "n=\\$((n+1))" TERM; echo $$ > $NOTES/up.$$; '
            'while [ $n = 0 ]; do sleep 0.05; done; sleep 0.5; echo signals $n')
        self.wait_notes("up", 4)
        process.terminate()
        code, out, err = self.finish(process)
        self.assertEqual(code, 143, err)
        self.assertEqual(err.count("that lockstep run has started, and every such rank"), 2, err)
        # Each innermost rank felt it once, and had the time to say so.
        self.assertEqual(out.count("signals 1"), 4, out + err)

    def test_an_inner_failure_fails_the_outer_launcher(self):
        own = os.path.join(self.dir.name, "own.json")
        code, _, err = self.run_ranks(
            1, self.launcher(), "run", "--standalone", "--nproc-per-node=2", "--no-python", "bash",
            "-c", '[ $RANK = 0 ] && sleep 300; '
            'echo \'"the innermost message"\' > $TORCHELASTIC_ERROR_FILE; exit 6',
            flags=("--no-python",), env={"TORCHELASTIC_ERROR_FILE": own})
        self.assertEqual(code, 6, err)
        with open(own) as f:
            self.assertIn("the innermost message", f.read())

    def test_more_ranks_than_the_usual_limit_of_files_allows(self):
        process = self.start_bash(100, "ulimit -n",
                                  prefix=("bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash"))
        code, out, err = self.finish(process, 2 * BOUND_S)
        self.assertEqual(code, 0, err)
        self.assertEqual(out.count("] 200\n"), 100)

    def test_too_few_files_are_named_with_the_remedy(self):
        enough = 0
        for limit in range(8, 64):
            code, _, err = self.bash(2, "true", prefix=(
                "bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash"))
            if code == 0:
                enough = limit
                break
            self.assertRegex(err, rf"\[\w+\] cannot .*: Too many open files \(at most {limit}\)\. "
                             "Raise the limit with `ulimit -n 1024`; its hard limit is "
                             rf"{limit}, which", f"limit {limit}")
            self.assertNotIn("filesystem error", err)
            self.assertNotRegex(err, "(?m)Too many open files$")
        self.assertGreater(enough, 12)

    def test_the_number_of_threads_is_chosen_and_logged_once(self):
        # The first rank to fail ends the other, so it waits until that has spoken.
        process = self.start_bash(2, WAITS + 'k=$TORCHELASTIC_RESTART_COUNT; '
                                  'echo threads $OMP_NUM_THREADS; echo $$ > $NOTES/said_$k.$RANK; '
                                  'until_notes said_$k.0 said_$k.1; exit $((1 - k))',
                                  "--max-restarts=1",
                                  prefix=("env", "-u", "OMP_NUM_THREADS"))
        code, out, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertEqual(err.count("OMP_NUM_THREADS="), 1, err)
        chosen = re.search("OMP_NUM_THREADS=([0-9]+) for each rank", err).group(1)
        self.assertEqual(out.count(f"threads {chosen}\n"), 4)

    def test_ranks_survive_a_launcher_that_is_merely_stopped(self):
        process = self.start_bash(2, 'echo $$ > $NOTES/up.$RANK; sleep 1; echo fine')
        self.wait_notes("up", 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        code, out, _ = self.finish(process)
        self.assertEqual((code, out.count("fine")), (0, 2))


if __name__ == "__main__":
    unittest.main(verbosity=1)

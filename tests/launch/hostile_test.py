"""Hostile peers of the launcher: what they can read, end and delay."""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import unittest

from launch_case import BOUND_S, SOAK
from nodes_test import WAIT, Nodes

PROTOCOL = 5
SECRETS = ["correct horse battery staple", "another horse, another staple"]


def line(kind, **fields):
    message = {"lockstep": PROTOCOL, "kind": kind, "node": 1, "attempt": 0, "signal": 0, "code": 0,
               "request": 1, "text": "", "run": "", **fields}
    return json.dumps(message).encode() + b"\n"


# What a launcher without flags sends.
FLAGS = {"--max-restarts": "0", "--replace-gloo": "false", "--shutdown-timeout": "30",
         "--signals-to-handle": "SIGHUP,SIGINT,SIGQUIT,SIGTERM", "--timeout": "unset"}


# Whose role is its own may run another program than node 0.
SHARE = {"nproc_per_node": 2, "role": "peer", "program": ""}


def handshake(**fields):
    return line("handshake", **{"run_id": "none", "host": "evil", "nnodes": 2, "flags": FLAGS,
                            "share": SHARE, **fields})


def frame(kind, stream, value, payload=b"", attempt=0):
    """A frame of the store (store_table.h): 1 opens a stream, 2 is data, 4 credit."""
    return struct.pack("<BIQI", kind, attempt, stream, value) + payload


def failure(**fields):
    return json.dumps({"rank": 2, "local_rank": 0, "node": 1, "pid": 1, "attempt": 0,
                       "host": "evil", "cause": "x", "code": 1, "time": 0, "after_s": 0,
                       "message": "", "restartable": True, "stack": [], "last_lines": [],
                       "note": "", "others": [], "ended_before": [], "logs": "", **fields})


class Hostile(Nodes):
    def answer(self, data):
        with self.connect() as peer:
            peer.sendall(data)
            return peer.makefile("rb").readline()

    def join(self, **fields):
        """As node 1, until the run has started."""
        peer = self.connect()
        peer.sendall(handshake(**fields))
        stream = peer.makefile("rb")
        while json.loads(stream.readline())["kind"] != "start":
            pass
        return peer

    def supervisor_of(self, process):
        """The launcher's second process, which has the sockets."""
        end = time.monotonic() + BOUND_S
        while time.monotonic() < end:
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
                if pids := f.read().split():
                    return int(pids[0])
            time.sleep(0.02)
        self.fail("the launcher has no second process")

    def cpu_s(self, pid):
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def finishes(self, first, *flags):
        """The right node 1 is served as if nothing had been."""
        for code, err in self.ends([first, self.node(1, "echo ran", *flags)]):
            self.assertEqual(code, 0, err)


class WithoutSecret(Hostile):
    def test_a_rejection_reveals_nothing_about_the_run(self):
        first = self.node(0, "echo ran", "--rdzv-id=hidden42")
        answers = {self.answer(handshake(**fields)) for fields in (
            {"run_id": "none"},
            {"run_id": "hidden42", "nnodes": 3},
            {"run_id": "hidden42", "node": 7},
            {"run_id": "hidden42", "flags": {**FLAGS, "--max-restarts": "7"}},
            {"run_id": "hidden42", "flags": {}},
            {"run_id": "hidden42", "share": {**SHARE, "nproc_per_node": 1_000_000}},
            {"run_id": "hidden42", "share": {**SHARE, "role": "default"}})}
        self.assertEqual(len(answers), 1, answers)
        (answer,) = answers
        self.assertEqual(json.loads(answer)["kind"], "refused")
        for ours in ("hidden42", os.uname().nodename, "nnodes", "--"):
            self.assertNotIn(ours, answer.decode())
        # What a user needs is on node 0's own terminal.
        self.wait_line(first.stderr, "--rdzv-id=none, node 0 with --rdzv-id=hidden42",
                       "--nnodes=3, node 0 with --nnodes=2", "--node-rank=7 on evil",
                       "evil was started with another program, or with other arguments, than "
                       "node 0")
        self.finishes(first, "--rdzv-id=hidden42")

    def test_a_joined_peer_cannot_end_the_run_with_0(self):
        for name, data in {
                "stop 0": line("stop", signal=0), "stop 17": line("stop", signal=17),
                "stop 64": line("stop", signal=64), "stop 9": line("stop", signal=9),
                "failed 0": line("failed", failure=failure(code=0)),
                "failed 256": line("failed", failure=failure(code=256)),
                "failed for another": line("failed", failure=failure(rank=0, node=0)),
                "down 0": line("down", failure=failure(code=0))}.items():
            with self.subTest(name):
                self.forget_notes()
                first = self.node(0, WAIT)
                with self.join() as peer:
                    self.wait_notes("up", 2)
                    peer.sendall(data)
                    code, _, err = self.finish(first)
                self.assertEqual(code, 1, err)
                self.assertIn("the launcher of node 1 on evil is lost", err)

    def test_who_joins_and_breaks_the_protocol_of_the_store_is_lost(self):
        for name, data, wanted in (
                ("too long", frame(2, 1, 1 << 30), "has a bad length"),
                ("no stream", frame(1, 0, 0), "has no stream"),
                ("twice", 2 * frame(1, 1, 2), "opens a stream again"),
                ("too much", frame(1, 1, 2) + 9 * frame(2, 1, 16_000, 16_000 * b"\0"),
                 "exceeds the window of its stream"),
                ("nonsense", frame(1, 1, 2) + frame(2, 1, 9, b"nonsense\n"),
                 "not from a TCPStore client"),
                ("credit", frame(4, 0, 1), "reports bytes that were not sent")):
            with self.subTest(name):
                self.forget_notes()
                first = self.node(0, WAIT)
                with self.join() as peer:
                    self.wait_notes("up", 2)
                    peer.sendall(data)
                    if "TCPStore" in wanted:  # its client is dropped, and it is still a node
                        self.wait_line(first.stderr, wanted, "rank 2 on node 1 is closed")
                        peer.shutdown(socket.SHUT_RDWR)
                    code, _, err = self.finish(first)
                self.assertEqual(code, 1, err)
                self.assertIn("the launcher of node 1 on evil is lost", err)
                self.assertIn(wanted, err)

    def test_a_store_frame_before_the_start_ends_nothing(self):
        first = self.node(0, "echo ran", nnodes=3)
        self.answer(frame(1, 1, 0))
        self.answer(handshake(nnodes=3) + frame(1, 1, 0))
        others = [self.node(rank, "echo ran", nnodes=3) for rank in (1, 2)]
        results = self.ends([first, *others])
        for code, err in results:
            self.assertEqual(code, 0, err)
        self.assertIn("it used the store before the run has begun", results[0][1])

    def test_a_stop_before_the_start_ends_nothing(self):
        first = self.node(0, "echo ran", nnodes=3)
        self.answer(handshake(nnodes=3) + line("stop", signal=15))
        others = [self.node(rank, "echo ran", nnodes=3) for rank in (1, 2)]
        results = self.ends([first, *others])
        for code, err in results:
            self.assertEqual(code, 0, err)
        self.assertIn("node rank 1 on evil left again", results[0][1])

    def test_remote_text_is_escaped(self):
        evil = "\x1b]0;owned\x07\x9b2J\u202eabc\n[launch] forged"
        first = self.node(0, WAIT)
        self.answer(handshake(node=7, host=evil))
        self.answer(handshake(run_id=evil))
        with self.join(host=evil) as peer:
            self.wait_notes("up", 2)
            peer.sendall(line("failed", failure=failure(
                cause=evil, message=evil, stack=[evil], last_lines=[evil], host=evil,
                others=[evil], note=evil, logs=evil, code=3, program=evil, error_file=evil,
                stacks=evil, standing=[evil], victims=[evil])))
            peer.sendall(line("down", failure=failure(cause=evil, host=evil, code=3,
                                                      standing=[evil], victims=[evil])))
            code, _, err = self.finish(first)
        self.assertEqual(code, 3, err)
        self.assertIn("--rdzv-id=\\x1b]0;owned", err)
        self.assertIn(r"\x1b]0;owned\x07\u009b2J\u202eabc", err)
        for character in "\x1b\x07\x9b\u202e":
            self.assertNotIn(character, err)
        self.assertNotIn("\n[launch] forged", err)

    def test_what_cannot_be_read_writes_no_lines_either(self):
        first = self.node(0, WAIT)
        with self.join() as peer:
            self.wait_notes("up", 2)
            peer.sendall(line("x\x1b\n[launch] forged"))
            code, _, err = self.finish(first)
        self.assertEqual(code, 1, err)
        self.assertIn("unknown message 'x\\x1b [launch] forged'", err)

    def test_a_hostile_node_0_cannot_control_the_terminal_or_end_with_0(self):
        for name, data, wanted in (
                ("refused 0", line("refused", code=0, text="\x1b[2J"), "not a launcher"),
                ("refused", line("refused", code=2, text="no \x1b[2J"), r"no \x1b[2J"),
                ("say", line("say", text="hi \x1b[2J") + line("end", code=5), r"hi \x1b[2J"),
                ("end 0", line("end", code=0, failure=failure()), "not a launcher"),
                ("start", line("start", nodes=[SHARE]),
                 "not a launcher"),
                ("failed here", line("say") + line("end", code=1, failure=failure(local_rank=99)),
                 "local rank 99 here, which does not exist")):
            with self.subTest(name):
                for join_s in (2, 20):
                    code, err = self.answered_with(data, join_s)
                    self.assertNotEqual(code, 0, err)
                    self.assertNotIn("\x1b", err)
                    if wanted in err:  # otherwise we were too slow for it
                        break
                self.assertIn(wanted, err)

    def answered_with(self, data, join_s):
        """How node 1 ends whose node 0 sends this."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
            server.settimeout(BOUND_S)
            second = self.node(1, "echo ran", f"--rdzv-conf=join_timeout={join_s}")
            with contextlib.suppress(ConnectionError), server.accept()[0] as node:
                node.makefile("rb").readline()
                node.sendall(data)
                with contextlib.suppress(ConnectionError):
                    node.makefile("rb").read()
            code, _, err = self.finish(second)
        return code, err

    def test_first_lines_are_short_and_have_a_deadline(self):
        first = self.node(0, "echo ran")
        with self.connect() as long, self.connect() as slow:
            long.sendall(b"{" + b" " * 8192)
            with contextlib.suppress(ConnectionError):
                self.assertEqual(long.recv(1), b"")
            began = time.monotonic()
            slow.sendall(b"{")
            slow.settimeout(0.5)
            with contextlib.suppress(ConnectionError):
                while True:  # a byte now and then does not earn more time
                    self.assertLess(time.monotonic() - began, BOUND_S)
                    with contextlib.suppress(TimeoutError):
                        self.assertEqual(slow.recv(1), b"")
                        break
                    slow.sendall(b" ")
            self.assertLess(time.monotonic() - began, 20)
        self.finishes(first)

    def test_many_idle_connections_do_not_keep_a_node_out(self):
        first = self.node(0, "echo ran")
        self.connect().close()
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(self.connect())
            held = os.listdir(f"/proc/{self.supervisor_of(first)}/fd")
            self.assertLess(len(held), 200)
            self.finishes(first)

    def test_running_out_of_descriptors_does_not_spin(self):
        first = self.node(0, "echo ran", prefix=("prlimit", "--nofile=40:40"))
        self.connect().close()
        pid = self.supervisor_of(first)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(self.connect())
            before = self.cpu_s(pid)
            time.sleep(2)
            self.assertLess(self.cpu_s(pid) - before, 0.5)
            self.finishes(first)

    def test_a_flood_leaves_few_lines(self):
        first = self.node(0, "echo ran")
        count = 10_000 if SOAK else 1000
        for number in range(count):
            with self.connect() as peer:
                messages = (handshake(node=number + 2), b"GET / HTTP/1.0\r\n\r\n", b"")
                peer.sendall(messages[number % 3])
        second = self.node(1, "echo ran")
        code, _, err = self.finish(first)
        self.assertEqual(code, 0, err)
        self.assertLess(len(err.splitlines()), 10 + 10 * count // 1000)
        self.assertEqual(self.finish(second)[0], 0)

    def test_one_line_says_who_can_join(self):
        processes = self.both("echo ran", "--rdzv-id=mine")
        (code, first), (_, second) = self.ends(processes)
        self.assertEqual(code, 0, first)
        self.assertRegex(first, r"without --secret-file anybody who reaches port \d+ here and "
                                r"knows the run id \(mine\) can join")
        self.assertNotIn("--secret-file", second)


class WithSecret(Hostile):
    def setUp(self):
        super().setUp()
        self.files = []
        for number, secret in enumerate(SECRETS):
            path = os.path.join(self.dir.name, f"secret{number}")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
                f.write(secret + "\n" * number)
            self.files.append(path)

    def secret(self, number):
        return f"--secret-file={self.files[number]}"

    def test_the_same_secret_runs_and_restarts(self):
        script = ('echo attempt $TORCHELASTIC_RESTART_COUNT; '
                  'exit $((1 - TORCHELASTIC_RESTART_COUNT))')
        trailing = os.path.join(self.dir.name, "trailing")
        with open(os.open(trailing, os.O_WRONLY | os.O_CREAT, 0o400), "w") as f:
            f.write(f"  {SECRETS[0]}\r\n")
        first = self.node(0, script, self.secret(0), "--max-restarts=1")
        second = self.node(1, script, f"--secret-file={trailing}", "--max-restarts=1")
        for process in (first, second):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertEqual(out.count("attempt 1"), 2)
            self.assertNotIn("anybody", err)

    def test_a_long_report_reaches_the_other_host(self):
        script = ('if [ $RANK = 3 ]; then sleep 0.3; for i in $(seq 40); do '
                  'printf "%0400d\\n" $i >&2; done; exit 5; fi; sleep 300')
        for code, err in self.ends(self.both(script, self.secret(0))):
            self.assertEqual(code, 5, err)
            self.assertRegex(err, "last lines of its stderr:\n    0{398}21\n(.*\n){18} *0*40\n")

    def disagree(self, first_flags, second_flags, first_text, second_text, then):
        """Node 0 with the first flags and node 1 with the second: both name the flag; node 0 goes
        on waiting for the right one."""
        first = self.node(0, "echo ran", *first_flags)
        code, _, err = self.finish(self.node(1, "echo ran", *second_flags))
        self.assertEqual(code, 2, err)
        self.assertIn(second_text, err)
        self.wait_line(first.stderr, first_text)
        for code, err in self.ends([first, self.node(1, "echo ran", *then)]):
            self.assertEqual(code, 0, err)

    def test_different_secrets(self):
        text = "does not have the secret of this launcher's --secret-file"
        self.disagree([self.secret(0)], [self.secret(1)], text, text, [self.secret(0)])

    def test_another_run_id(self):
        text = "the same --rdzv-id"
        self.disagree([self.secret(0), "--rdzv-id=a"], [self.secret(0), "--rdzv-id=b"], text, text,
                      [self.secret(0), "--rdzv-id=a"])

    def test_only_node_0_has_one(self):
        self.disagree([self.secret(0)], [], "has no --secret-file, but this launcher has one",
                      "has a --secret-file, but this launcher has none", [self.secret(0)])

    def test_only_node_1_has_one(self):
        self.disagree([], [self.secret(0)], "has a --secret-file, but this launcher has none",
                      "has no --secret-file, but this launcher has one", [])

    def test_other_differences_are_named_to_holders_of_the_secret(self):
        first = self.node(0, "echo ran", self.secret(0))
        code, _, err = self.finish(self.node(1, "echo ran", self.secret(0), nnodes=3))
        self.assertEqual(code, 2, err)
        self.assertIn("--nnodes=3, node 0 with --nnodes=2", err)
        self.finishes(first, self.secret(0))

    def test_invalid_secret_files(self):
        def made(name, text, mode):
            path = os.path.join(self.dir.name, name)
            with open(path, "w") as f:
                f.write(text)
            os.chmod(path, mode)
            return path
        os.mkfifo(os.path.join(self.dir.name, "fifo"), 0o600)
        cases = [(made("open", SECRETS[0], 0o644), "has mode 0644: others on this host may use it"),
                 (made("group", SECRETS[0], 0o620), "has mode 0620"),
                 (made("short", "123456789012345\n", 0o600), "holds 15 bytes; a secret has 16 to"),
                 (made("long", "x" * 5000, 0o600), "holds too many bytes"),
                 (os.path.join(self.dir.name, "fifo"), "is not a regular file"),
                 (self.dir.name, "is not a regular file"),
                 (os.path.join(self.dir.name, "none"), "cannot be read: No such file")]
        if os.geteuid() == 0:
            other = made("other", SECRETS[0], 0o600)
            os.chown(other, 12345, -1)
            cases.append((other, "belongs to user 12345, not to this one (0)"))
        for path, text in cases:
            for rank in (0, 1):
                with self.subTest(path=path, rank=rank):
                    code, _, err = self.finish(
                        self.node(rank, "echo ran", f"--secret-file={path}"))
                    self.assertEqual(code, 2, err)
                    self.assertIn(f"--secret-file={path} {text}", err)

    def test_the_variables(self):
        first = self.start("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1",
                           f"--master-port={self.port}", "--no-python", "true",
                           env={"LOCKSTEP_SECRET_FILE": self.files[0]})
        second = self.start("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1",
                            f"--master-port={self.port}", "--no-python", "true",
                            env={"PET_SECRET_FILE": self.files[0],
                                 "LOCKSTEP_SECRET_FILE": self.files[1]})
        for code, err in self.ends([first, second]):
            self.assertEqual(code, 0, err)
        # One host has no link: the variable is for others, the flag gets a line.
        code, _, err = self.bash(1, "true", env={"LOCKSTEP_SECRET_FILE": "/nowhere"})
        self.assertEqual((code, "secret" in err), (0, False), err)
        code, _, err = self.bash(1, "true", flags=["--secret-file=/nowhere"])
        self.assertEqual(code, 0, err)
        self.assertIn("--secret-file=/nowhere is ignored on one host", err)

    def s_client(self, *args, data=b""):
        """What `openssl s_client` and the server said."""
        done = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{self.port}", "-tls1_3", "-msg",
             "-ign_eof", *args], input=data, capture_output=True, timeout=BOUND_S)
        return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    @unittest.skipUnless(shutil.which("openssl"), "needs the openssl program")
    def test_clients_without_the_secret_learn_and_end_nothing(self):
        first = self.node(0, "echo ran", self.secret(0), "--rdzv-id=hidden42")
        self.connect().close()
        alerts = set()
        for args in (["-psk", "00" * 32, "-psk_identity", "hidden42"],
                     ["-psk", "00" * 32, "-psk_identity", "none"]):
            data = handshake(run_id="hidden42") + line("stop", signal=15)
            out, err = self.s_client(*args, data=data)
            alerts.add(tuple(re.findall(r"<<< TLS 1\.\d.*\n.*", out)))
            self.assertNotIn("refused", out)
            self.assertIn(" alert ", err)
        self.assertEqual(len(alerts), 1, "a known run id can be distinguished from an unknown one")
        _, err = self.s_client()  # no key at all
        self.assertIn("alert", err)
        # In clear text, what would join, start and stop.
        with self.connect() as peer:
            peer.sendall(handshake(run_id="hidden42") + line("stop", signal=0))
            with contextlib.suppress(ConnectionError):
                self.assertEqual(peer.makefile("rb").read(), b"\x15\x03\x03\x00\x02\x02\x28")
        for data in (b"\x16\x03\x01" + b"\xff" * 40, b"\x16\x03\x01\x40\x00" + b"\0" * 20_000,
                     b"GET / HTTP/1.0\r\n\r\n", os.urandom(3000)):
            with self.connect() as peer, contextlib.suppress(ConnectionError):
                peer.sendall(data)
                reply = peer.makefile("rb").read()
                self.assertLess(len(reply), 16)
                self.assertNotIn(b"hidden42", reply)
        self.finishes(first, self.secret(0), "--rdzv-id=hidden42")

    def relay(self, change):
        """A port that leads to node 0; (port, all that went through it)."""
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(BOUND_S)
        seen = bytearray()

        def pump(source, target, towards):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    seen.extend(data)
                    target.sendall(change(towards, data))
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve():
            with contextlib.suppress(OSError), server:
                while True:
                    node, upstream = server.accept()[0], self.connect()
                    with node, upstream:
                        pumps = [threading.Thread(target=pump, args=ends, daemon=True)
                                 for ends in ((node, upstream, 0), (upstream, node, 1))]
                        for each in pumps:
                            each.start()
                        for each in pumps:
                            each.join()

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1], seen

    def through_relay(self, change, script="echo my output", *flags):
        first = self.node(0, script, self.secret(0), "--rdzv-id=hidden42", *flags)
        port, seen = self.relay(change)
        own, self.port = self.port, port
        second = self.node(1, script, self.secret(0), "--rdzv-id=hidden42", *flags)
        self.port = own
        return self.ends([first, second]), seen

    def test_only_the_run_id_is_sent_in_clear_text(self):
        script = 'if [ $RANK = 3 ]; then sleep 0.3; echo my last line >&2; exit 5; fi; sleep 300'
        results, seen = self.through_relay(lambda towards, data: data, script)
        for code, err in results:
            self.assertEqual(code, 5, err)
            self.assertIn("my last line", err)
        self.assertGreater(len(seen), 1000)
        # Long enough not to occur by chance in what is encrypted.
        for text in (b'"lockstep"', b"my last line", b"nproc_per_node", b"exited with code"):
            self.assertNotIn(text, bytes(seen))

    def test_a_changed_byte_is_noticed(self):
        from_node_0 = []

        def change(towards, data):
            if towards == 1:
                from_node_0.append(data)
            if len(from_node_0) < 2:  # the handshake
                return data
            return data[:-1] + bytes([data[-1] ^ 1])

        results, _ = self.through_relay(change, "sleep 30", "--rdzv-conf=join_timeout=3",
                                        "--shutdown-timeout=1")
        for code, err in results:
            self.assertNotEqual(code, 0, err)


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""Several launchers as several hosts: on the loopback interface, and in network namespaces."""
import contextlib
import glob
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import uuid

from cable import Cable
from launch_case import BOUND_S, WAITS, Case, free_port, marked

WAIT = 'echo $$ > $NOTES/up.$RANK; sleep 300'

# With a name server that never answers; it notes the first question.
SLOW_NAMES = ("unshare", "--map-root-user", "--mount", "--net", "bash", "-c", r'''
printf 'nameserver 127.0.0.1\noptions timeout:30 attempts:1\n' > $NOTES/resolv.conf
ip link set lo up && mount --bind $NOTES/resolv.conf /etc/resolv.conf || exit 99
python3 -c 'import os, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 53))
open(os.environ["NOTES"] + "/bound", "w").close()
s.recv(512)
with open(os.environ["NOTES"] + "/asked.tmp", "w") as f:
    f.write(str(os.getpid()))
os.rename(os.environ["NOTES"] + "/asked.tmp", os.environ["NOTES"] + "/asked.0")
s.recv(512)' &
while [ ! -e $NOTES/bound ]; do kill -0 $! || exit 99; sleep 0.02; done
"$@" & launcher=$!; trap "kill -TERM $launcher" TERM; wait $launcher; wait $launcher; code=$?
kill -9 %1; exit $code''', "bash")


def can_be_slow():
    with tempfile.TemporaryDirectory() as notes:
        return subprocess.run([*SLOW_NAMES, "true"], capture_output=True,
                              env={**os.environ, "NOTES": notes}).returncode == 0


class Nodes(Case):
    def setUp(self):
        super().setUp()
        self.port = free_port()

    def node(self, rank, script, *flags, nnodes=2, nproc=2, address="127.0.0.1", prefix=()):
        return self.start(f"--nnodes={nnodes}", f"--node-rank={rank}", f"--nproc-per-node={nproc}",
                          f"--master-addr={address}", f"--master-port={self.port}", *flags,
                          "--no-python", "bash", "-c", script, prefix=prefix)

    def both(self, script, *flags, **options):
        return [self.node(rank, script, *flags, **options) for rank in (0, 1)]

    def connect(self):
        """To node 0, as soon as it listens."""
        end = time.monotonic() + BOUND_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_S)
            except ConnectionRefusedError:
                self.assertLess(time.monotonic(), end, "node 0 does not listen")
                time.sleep(0.02)

    def ends(self, processes, bound_s=BOUND_S):
        """(exit code, stderr) of each, all within the bound."""
        end = time.monotonic() + bound_s
        results = []
        for process in processes:
            code, _, err = self.finish(process, max(0.1, end - time.monotonic()))
            results.append((code, err))
        return results


class Loopback(Nodes):
    @unittest.skipUnless(can_be_slow(), "needs a network namespace")
    def test_a_slow_name_server_does_not_hold_up_a_stop_request(self):
        process = self.node(1, "true", address="slow.example.org", prefix=SLOW_NAMES)
        self.wait_notes("asked", 1)
        began = time.monotonic()
        process.terminate()
        code, _, err = self.finish(process)
        self.assertEqual(code, 143, err)
        self.assertLess(time.monotonic() - began, 20)  # of the 30 s that the lookup takes

    @unittest.skipUnless(can_be_slow(), "needs a network namespace")
    def test_a_slow_name_of_this_host_does_not_hold_up_a_stop_request(self):
        process = self.node(0, "true", "--local-addr=slow.example.org", prefix=SLOW_NAMES, nnodes=2)
        self.wait_notes("asked", 1)
        began = time.monotonic()
        process.terminate()
        code, _, err = self.finish(process)
        self.assertEqual(code, 143, err)
        self.assertLess(time.monotonic() - began, 20)  # of the 30 s that the lookup takes

    def can_bind(self, address):
        """Whether another user could."""
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                taken.bind((address, self.port))
                return True
        return False

    def test_nobody_else_gets_the_port_of_the_launchers(self):
        # At no address of the host, from the first moment to the last; 0.0.0.0 leads to loopback.
        processes = [self.node(0, WAIT, "--max-restarts=1", address="0.0.0.0")]
        self.connect().close()
        self.assertFalse(self.can_bind("127.0.0.2"), "while nodes are waited for")
        processes.append(self.node(1, WAIT, "--max-restarts=1", address="0.0.0.0"))
        self.wait_notes("up", 4)
        self.assertFalse(self.can_bind("127.0.0.2"), "while ranks run")
        self.assertFalse(self.can_bind("127.0.0.1"), "while ranks run")
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_S)
        self.forget_notes()
        processes[1].kill()
        self.wait_line(processes[0].stderr, "as soon as every node is here again")
        self.assertFalse(self.can_bind("127.0.0.2"), "while a lost node is waited for")
        processes[1] = self.node(1, WAIT, "--max-restarts=1", address="0.0.0.0")
        self.wait_notes("up", 4)
        self.assertFalse(self.can_bind("127.0.0.2"), "in the next attempt")
        processes[0].terminate()
        self.assertEqual([code for code, _ in self.ends(processes)], [143, 143])

    def test_a_run_on_two_nodes(self):
        # Every rank speaks to its own launcher, as a TCPStore client does; the keys are the same.
        program = os.path.join(self.dir.name, "connect.py")
        with open(program, "w") as f:
            f.write(r'''
import os, socket, struct, time
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert where[0] == "127.0.0.1"
end = time.monotonic() + 60
while True:
    try:
        s = socket.create_connection(where)
        break
    except OSError:
        assert time.monotonic() < end
        time.sleep(0.02)
s.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
def add(amount):
    s.sendall(struct.pack("=BQ3sq", 4, 3, b"sum", amount))
    return struct.unpack("=q", s.recv(8, socket.MSG_WAITALL))[0]
add(10 ** int(os.environ["RANK"]))
while (sum := add(0)) != 1111:
    assert time.monotonic() < end, sum
    time.sleep(0.02)
print("node", os.environ["GROUP_RANK"], "local", os.environ["LOCAL_RANK"], flush=True)
''')
        second = self.node(1, f"exec python3 {program}")  # before node 0 is there
        time.sleep(0.5)
        first = self.node(0, f"exec python3 {program}")
        for process, wanted in ((first, ["[0] node 0 local 0", "[1] node 0 local 1"]),
                                (second, ["[2] node 1 local 0", "[3] node 1 local 1"])):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertEqual(sorted(out.splitlines()), wanted)
            self.assertIn("gloo and NCCL use interface lo (127.0.0.1)", err)

    def test_with_a_loopback_master_nothing_listens_beyond_loopback(self):
        waiting = self.node(0, "true")
        local = f"0100007F:{self.port:04X}"
        end = time.monotonic() + BOUND_S
        while not (listeners := self.listeners()) and time.monotonic() < end:
            time.sleep(0.02)
        self.assertEqual(listeners, {local})
        for code, err in self.ends([waiting, self.node(1, "true")]):
            self.assertEqual(code, 0, err)

    def listeners(self):
        """Addresses, in the kernel's notation, at which somebody listens on the master port."""
        found = set()
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError), open(f"/proc/net/{name}", encoding="ascii") as file:
                for _, address, _, state, *_ in map(str.split, file):
                    if state == "0A" and address.endswith(f":{self.port:04X}"):
                        found.add(address)
        return found

    def death_s(self, rank):
        """Seconds from its end to that of both launchers."""
        self.forget_notes()
        processes = self.both(WAIT)
        pids = self.wait_notes("up", 4)
        began = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        for code, err in self.ends(processes):
            self.assertEqual(code, 137, err)
            self.assertIn(f"rank {rank} on {os.uname().nodename} failed: killed by SIGKILL", err)
            self.assertIn(f"(local rank {rank % 2}, pid {pids[rank]}", err)
        took_s = time.monotonic() - began
        self.assertEqual(marked(self.marker), [])
        return took_s

    def check_death(self, rank):
        took_s = []
        # One of some is soon: other work on the machine slows them down, never speeds one up.
        while not took_s or (min(took_s) >= 5 and len(took_s) < 3):
            took_s.append(self.death_s(rank))
        self.assertLess(min(took_s), 5)

    def test_a_rank_that_dies_ends_both_on_node_0(self):
        self.check_death(1)

    def test_a_rank_that_dies_ends_both_on_node_1(self):
        self.check_death(2)

    def test_the_error_of_a_rank_is_printed_on_both_nodes(self):
        script = ('if [ $RANK = 3 ]; then sleep 0.3; echo my last line >&2; '
                  'echo \'"my message"\' > $TORCHELASTIC_ERROR_FILE; exit 5; fi; sleep 300')
        for code, err in self.ends(self.both(script)):
            self.assertEqual(code, 5, err)
            self.assertIn("failed: exited with code 5: my message\n", err)
            self.assertRegex(err, "last lines of its stderr:\n    my last line")

    def test_ranks_that_leave_are_the_cause_on_the_other_host(self):
        # Nothing shows when node 1's launcher has notified node 0's: it has three seconds.
        script = WAITS + (
            'touch $TORCHELASTIC_ERROR_FILE.inside; echo $$ > $NOTES/up.$RANK; '
            'if [ $GROUP_RANK = 1 ]; then exit 0; fi; '
            'if [ $RANK = 0 ]; then until_gone up.2; until_gone up.3; sleep 3; '
            'echo \'"Connection closed"\' > $TORCHELASTIC_ERROR_FILE; exit 9; fi; '
            'sleep 300')
        for code, err in self.ends(self.both(script, "--monitor-interval=60")):
            self.assertEqual(code, 1, err)
            self.assertRegex(err, r"rank [23] on \S+ failed: exited with code 0 in the middle")
            self.assertRegex(err, r"failed after it:\n    rank 0 on \S+ failed: "
                                  r"exited with code 9: Connection closed\n")
        self.port = free_port()
        script = 'touch $TORCHELASTIC_ERROR_FILE.inside; sleep 0.$RANK; exit 0'
        for code, err in self.ends(self.both(script, "--monitor-interval=60")):
            self.assertEqual(code, 0, err)

    def test_a_launcher_that_is_killed_ends_the_other(self):
        for victim in (0, 1):
            with self.subTest(victim=victim):
                self.forget_notes()
                self.port = free_port()
                processes = self.both(WAIT)
                self.wait_notes("up", 4)
                processes[victim].kill()
                ((code, err),) = self.ends([processes[1 - victim]])
                self.assertEqual(code, 1, err)
                self.assertIn(f"the launcher of node {victim}", err)
                self.assertIn("is lost", err)
                self.assertEqual(self.wait_gone(), [])

    def test_a_stop_request_to_one_stops_both(self):
        for asked in (0, 1):
            with self.subTest(asked=asked):
                self.forget_notes()
                self.port = free_port()
                processes = self.both(WAIT, "--max-restarts=2")
                self.wait_notes("up", 4)
                processes[asked].terminate()
                for code, err in self.ends(processes):
                    self.assertEqual(code, 143, err)
                    self.assertNotIn("failed", err)

    def test_a_third_request_to_one_kills_on_both(self):
        for asked in (0, 1):
            with self.subTest(asked=asked):
                self.forget_notes()
                self.port = free_port()
                # Ranks that do not end when they are asked to, with a grace longer than the test.
                script = ('n=0; trap "n=\\$((n+1)); echo request \\$n" TERM; ' +
                          WAIT.replace("sleep 300", "while :; do sleep 0.05; done"))
                processes = self.both(script, "--shutdown-timeout=300")
                self.wait_notes("up", 4)
                processes[asked].terminate()
                for request in (1, 2):
                    self.wait_line(processes[asked].stdout, f"] request {request}\n")
                    time.sleep(0.2)  # the same request within 100 ms is an echo of itself
                    processes[asked].terminate()
                for code, err in self.ends(processes):
                    self.assertEqual(code, 143, err)
                    self.assertIn("third request to stop", err)
                    self.assertIn("sending SIGKILL to the ranks", err)

    def test_both_restart_together(self):
        script = ('echo attempt $TORCHELASTIC_RESTART_COUNT; '
                  '[ $RANK$TORCHELASTIC_RESTART_COUNT = 20 ] && sleep 0.2 && exit 5; sleep 0.5')
        for process in self.both(script, "--max-restarts=1"):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertEqual(out.count("attempt 1"), 2)
            self.assertIn("rank 2 on", err)
            self.assertIn("restarting all ranks (1 of 1)", err)

    def test_nodes_may_have_different_numbers_of_ranks_and_roles(self):
        """RANK, ROLE_RANK and the sizes are those of torchrun: by node rank, and within a role."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                 "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
        script = ("[ $RANK$TORCHELASTIC_RESTART_COUNT = 40 ] && exit 3; "
                  "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && sleep 300; "
                  "echo is " + " ".join(f"${name}" for name in names))
        nodes = [(2, "a"), (3, "b"), (1, "a")]
        processes = [self.node(node, script, f"--role={role}", "--max-restarts=1", nnodes=3,
                               nproc=nproc) for node, (nproc, role) in enumerate(nodes)]
        expected = [["0 6 0 2 0 3 a 0 3", "1 6 1 2 0 3 a 1 3"],
                    ["2 6 0 3 1 3 b 0 3", "3 6 1 3 1 3 b 1 3", "4 6 2 3 1 3 b 2 3"],
                    ["5 6 0 1 2 3 a 2 3"]]
        for process, wanted in zip(processes, expected):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertEqual(sorted(re.findall("is (.*)", out)), wanted)
            self.assertIn("rank 4 on", err)

    def test_a_failure_is_reported_whole_although_another_node_is_lost_meanwhile(self):
        # The stop of rank 5 takes long enough for node 1 to be lost before node 2 reports.
        script = ("trap 'echo $$ > $NOTES/stopping.$RANK; sleep 2; exit 1' TERM; "
                  "echo $$ > $NOTES/up.$RANK; [ $RANK = 4 ] || { sleep 300 & wait; }; "
                  "while [ ! -e $NOTES/go ]; do sleep 0.05; done; echo my last line >&2; exit 7")
        processes = [self.node(node, script, nnodes=3) for node in range(3)]
        self.wait_notes("up", 6)
        pathlib.Path(self.notes, "go").touch()
        self.wait_notes("stopping", 1)
        processes[1].kill()
        for node in (0, 2):
            code, _, err = self.finish(processes[node])
            self.assertEqual(code, 7, err)
            self.assertIn("my last line", err)

    def test_differences_are_refused_with_a_message(self):
        first = self.node(0, "echo ran", "--rdzv-id=a")
        for flags, options, message in (
                (("--rdzv-id=b",), {}, "--rdzv-id=b, node 0 with --rdzv-id=a"),
                (("--rdzv-id=a",), {"nnodes": 3}, "--nnodes=3, node 0 with --nnodes=2"),
                (("--rdzv-id=a", "--max-restarts=2"), {},
                 "--max-restarts=2, node 0 with --max-restarts=0"),
                (("--rdzv-id=a", "--shutdown-timeout=2.5"), {},
                 "--shutdown-timeout=2.5, node 0 with --shutdown-timeout=30"),
                (("--rdzv-id=a", "--timeout=60"), {}, "--timeout=60, node 0 with --timeout=unset"),
                (("--rdzv-id=a", "--replace-gloo"), {},
                 "--replace-gloo=true, node 0 with --replace-gloo=false"),
                (("--rdzv-id=a", "--signals-to-handle=SIGUSR2,SIGTERM"), {},
                 "--signals-to-handle=SIGTERM,SIGUSR2, node 0 with --signals-to-handle=SIGHUP,")):
            with self.subTest(message):
                code, _, err = self.finish(self.node(1, "echo ran", *flags, **options))
                self.assertEqual(code, 2, err)
                # Anybody can ask: the answer says where to look, node 0's terminal what differs.
                self.assertIn("Compare --rdzv-id, --nnodes and --node-rank", err)
                self.wait_line(first.stderr, f"node rank 1 on {os.uname().nodename}", message)
        # An unknown client with another protocol does no harm, and the right one can still join.
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            second = self.node(1, "echo ran", "--rdzv-id=a",
                               "--signals-to-handle=SIGQUIT,SIGHUP,SIGINT,SIGTERM")
            for code, err in self.ends([first, second]):
                self.assertEqual(code, 0, err)

    def test_a_node_rank_that_is_taken_is_refused(self):
        first = self.node(0, "echo ran", nnodes=3)
        rivals = [self.node(1, "echo ran", nnodes=3) for _ in range(2)]
        end = time.monotonic() + BOUND_S
        while all(rival.poll() is None for rival in rivals):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        rivals.sort(key=lambda rival: rival.poll() is None)  # whoever came last is refused
        code, _, err = self.finish(rivals[0])
        self.assertEqual(code, 2, err)
        self.assertIn("rejected node rank 1", err)
        self.wait_line(first.stderr, "--node-rank=1 of", "already taken")
        processes = [first, rivals[1], self.node(2, "echo ran", nnodes=3)]
        self.assertEqual([code for code, _ in self.ends(processes)], [0, 0, 0])

    def wait_for_node(self):
        """Until a node other than 0 looks for that at our port; it will look again."""
        with socket.create_server(("127.0.0.1", self.port)) as server:
            server.settimeout(BOUND_S)
            server.accept()[0].close()

    def test_waiting_times_out_and_names_missing_nodes(self):
        conf = "--rdzv-conf=join_timeout=6"
        joined = self.node(2, "echo ran", conf, nnodes=4)
        self.wait_for_node()  # node 0 reports after 3 s; node 2 must have joined by then
        first = self.node(0, "echo ran", conf, nnodes=4)
        self.finish(self.node(3, "echo ran", conf, "--rdzv-id=other", nnodes=4))
        for code, err in self.ends([first, joined]):
            self.assertEqual(code, 1, err)
            self.assertIn("waiting for node ranks 1, 3 at", err)
            self.assertNotIn("rejected.", err)  # the one that came has a line of its own
            self.assertIn("timed out: only 2 of 4 launchers came within 6 s; missing: "
                          "node ranks 1, 3", err)

    def test_the_launchers_wait_for_the_startup_timeout(self):
        for node, message in ((0, "timed out: only 1 of 2 launchers came within 1 s; missing: "
                                  "node rank 1."),
                              (1, "timed out: node 0's launcher was not found at 127.0.0.1")):
            for flag in ("--startup-timeout=1", "--rdzv-conf=join_timeout=1"):
                code, _, err = self.finish(self.node(node, "echo ran", flag))
                self.assertEqual(code, 1, err)
                self.assertIn(message, err)
                self.assertIn("within 1 s", err)
            self.assertEqual("Connection refused" in err, node == 1, err)

    def test_another_version_is_refused_on_both_sides(self):
        message = "the launchers run different versions of Lockstep (protocols 99 and 5)"
        first = self.node(0, "echo ran")
        with self.connect() as newer:
            newer.sendall(b'{"lockstep": 99, "kind": "handshake"}\n')
            answer = json.loads(newer.makefile().readline())
            # The number is all that it needs to say the same as node 0.
            self.assertEqual((answer["lockstep"], answer["kind"], answer["code"], answer["text"]),
                             (5, "refused", 2, ""))
        # It is still waiting for the right one.
        for code, err in self.ends([self.node(1, "echo ran"), first]):
            self.assertEqual(code, 0, err)
        self.assertIn(message, err)

        self.port = free_port()
        with socket.create_server(("127.0.0.1", self.port)) as server:
            server.settimeout(BOUND_S)
            second = self.node(1, "echo ran")
            with server.accept()[0] as node:
                node.sendall(b'{"lockstep": 99, "kind": "refused"}\n')
                code, _, err = self.finish(second)
        self.assertEqual(code, 2, err)
        self.assertIn(message, err)

    def test_a_node_0_that_hangs_after_its_answer_is_named(self):
        for join_s in (1, 20):
            with socket.create_server(("127.0.0.1", self.port)) as server:
                server.settimeout(BOUND_S)
                second = self.node(1, "echo ran", f"--rdzv-conf=join_timeout={join_s}")
                with server.accept()[0] as node:
                    handshake = json.loads(node.makefile().readline())
                    self.assertEqual((handshake["kind"], handshake["node"]), ("handshake", 1))
                    with contextlib.suppress(ConnectionError):
                        node.sendall(json.dumps({**handshake, "kind": "say"}).encode() + b"\n")
                    code, _, err = self.finish(second)
            if "was not found" not in err:  # we were too slow for it
                break
        self.assertEqual(code, 1, err)
        self.assertIn("node 0's launcher answered but never started the run", err)

    def test_a_request_to_stop_while_waiting(self):
        first = self.node(0, "echo ran")
        self.connect().close()
        first.terminate()
        self.assertEqual(self.finish(first)[0], 143)
        second = self.node(1, "echo ran")
        self.wait_for_node()
        second.terminate()
        self.assertEqual(self.finish(second)[0], 143)

    def test_a_request_to_stop_while_a_port_is_waited_for(self):
        for nnodes in (1, 2):
            with self.subTest(nnodes=nnodes), socket.create_server(("127.0.0.1", self.port)):
                process = self.node(0, "echo ran", nnodes=nnodes)
                self.wait_line(process.stderr, "is in use; waiting up to 5 s for it")
                process.terminate()
                code, _, err = self.finish(process)
                self.assertEqual(code, 143, err)

    def test_a_port_that_is_in_use(self):
        with socket.socket() as other:
            other.bind(("", self.port))
            other.listen()
            code, _, err = self.finish(self.node(0, "echo ran"))
            self.assertEqual(code, 2)
            self.assertIn(f"--master-port={self.port} cannot be used", err)

    def test_another_program_is_refused(self):
        first = self.node(0, "echo ran")
        code, _, err = self.finish(self.node(1, "echo other"))
        self.assertEqual(code, 2, err)
        self.wait_line(first.stderr, "was started with another program, or with other arguments, "
                                     "than node 0 (", "what differs between hosts goes into their "
                                     "environment, or gives them a --role of their own.")
        # A role may have a program of its own.
        for code, err in self.ends([first, self.node(1, "echo other", "--role=other")]):
            self.assertEqual(code, 0, err)

    def test_nodes_may_share_a_log_dir(self):
        logs = os.path.join(self.dir.name, "logs")
        processes = self.both("echo I am $RANK", "-r", "1", f"--log-dir={logs}", "--rdzv-id=j")
        self.assertEqual([code for code, _ in self.ends(processes)], [0, 0])
        for rank in range(4):
            (path,) = glob.glob(f"{logs}/j_*/node_{rank // 2}/attempt_0/{rank % 2}/stdout.log")
            with open(path) as f:
                self.assertEqual(f.read(), f"I am {rank}\n")


def can_make_namespaces():
    name = "lockstep_probe_" + uuid.uuid4().hex[:6]
    try:
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
            return False
        # A container may let one make a namespace but not enter it.
        entered = subprocess.run(["ip", "-n", name, "link"], capture_output=True).returncode == 0
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        return entered
    except OSError:
        return False


@unittest.skipUnless(can_make_namespaces(), "needs root and ip netns")
class Namespaces(Nodes):
    def setUp(self):
        super().setUp()
        self.cable = Cable("10.99.7")

    def tearDown(self):
        try:
            super().tearDown()
        finally:
            self.cable.remove()

    def hosts(self, script, *flags):
        return [self.node(rank, script, *flags, address="10.99.7.1",
                          prefix=self.cable.inside(rank)) for rank in (0, 1)]

    def test_the_interface_towards_the_master(self):
        processes = self.hosts("echo if $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME")
        for process, link, address in zip(processes, self.cable.links, ("10.99.7.1", "10.99.7.2")):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertEqual(set(re.findall(r"if (.*)", out)), {f"{link} ={link}"})
            self.assertIn(f"use interface {link} ({address})", err)

    def cut_the_cable(self):
        """Seconds until both launchers have ended."""
        self.forget_notes()
        processes = self.hosts(WAIT)
        self.wait_notes("up", 4)
        began = time.monotonic()
        self.cable.set_link(1, "down")
        for (code, err), other in zip(self.ends(processes), (1, 0)):
            self.assertEqual(code, 1, err)
            self.assertIn(f"the launcher of node {other}", err)
        took_s = time.monotonic() - began
        self.cable.set_link(1, "up")
        return took_s

    def test_a_network_partition(self):
        took_s = []
        # One of some is soon: other work on the machine slows them down, never speeds one up.
        while not took_s or (min(took_s) >= 7 and len(took_s) < 3):
            took_s.append(self.cut_the_cable())
        self.assertLess(min(took_s), 7)
        self.assertGreater(min(took_s), 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why

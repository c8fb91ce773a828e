"""What a run on two hosts opens to the network, seen from a third network namespace while its ranks
run: nothing of the store. Then the store itself over the link between the launchers."""
import importlib.util
import ipaddress
import os
import re
import signal
import subprocess
import sys
import time
import unittest
import uuid

from one_host_test import CAN_SPLIT, FRESH, PEER, listening, variable
from cable import ip
from launch_case import BOUND_S, Case, free_port, marked

HAVE_TORCH = importlib.util.find_spec("torch") is not None
TAG = uuid.uuid4().hex[:6]
SPACES = [f"ls{TAG}p", f"ls{TAG}q", f"ls{TAG}r"]  # node 0, node 1, and neither
# Node 0's addresses, towards node 1 and towards the third; and theirs.
ADDRESSES = ["10.99.6.1", "10.99.5.1"]
OTHERS = ["10.99.6.2", "10.99.5.2"]

PYTHON_RANK = r'''
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
print("ready with", dist.get_backend(), "sum", x[0].item(), flush=True)
time.sleep(600)
'''

# For each address and port: is the connection refused, and does a store answer? (A handshake and a
# ping of c10d's protocol.)
KNOCK = r'''
import socket, struct, sys
for where in sys.argv[1:]:
    address, port = where.split(":")
    try:
        with socket.create_connection((address, int(port)), timeout=5) as s:
            s.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 77))
            s.settimeout(1)
            try:
                answer = s.recv(64)
            except OSError:
                answer = b""
            print(where, "store" if answer == struct.pack("=I", 77) else "connected")
    except OSError as e:
        print(where, type(e).__name__)
'''


class Hosts(Case):
    def setUp(self):
        super().setUp()
        self.port = free_port()
        self.secret = os.path.join(self.dir.name, "secret")
        with open(os.open(self.secret, os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
            f.write(uuid.uuid4().hex)

    def both(self, *program, nproc=1, flags=(), nnodes=2, address="127.0.0.1", spaces=None, **env):
        return [self.start(
            f"--nnodes={nnodes}", f"--node-rank={node}", f"--nproc-per-node={nproc}",
            f"--master-addr={address}", f"--master-port={self.port}", *flags,
            f"--secret-file={self.secret}", "--line-prefix=rank", *program,
            prefix=("ip", "netns", "exec", spaces[node]) if spaces else (),
            env=dict(PYTHON_EXEC=sys.executable, CUDA_VISIBLE_DEVICES="", **env))
            for node in range(nnodes)]

    def script(self, text):
        path = os.path.join(self.dir.name, "rank.py")
        with open(path, "w") as f:
            f.write(text)
        return path


@unittest.skipUnless(CAN_SPLIT, "needs root and ip")
class Network(Hosts):
    @classmethod
    def setUpClass(cls):
        for space in SPACES:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        for index, (other, address) in enumerate(zip(SPACES[1:], OTHERS)):
            mine, theirs = f"x{TAG}{index}", f"y{TAG}{index}"
            ip("link", "add", mine, "type", "veth", "peer", "name", theirs)
            for space, link, own in ((SPACES[0], mine, ADDRESSES[index]), (other, theirs, address)):
                ip("link", "set", link, "netns", space)
                ip("-n", space, "addr", "add", f"{own}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
        ip("-n", SPACES[2], "route", "add", "10.99.6.0/24", "via", ADDRESSES[1])

    @classmethod
    def tearDownClass(cls):
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def knock(self, places):
        return subprocess.run(
            ["ip", "netns", "exec", SPACES[2], sys.executable, "-c", KNOCK, *places],
            capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()

    def sockets_of(self, *program, **options):
        """By node, once all ranks are ready: where the launcher listens, where its ranks do, and
        their MASTER_ADDR and MASTER_PORT. A third host reaches no launcher and no store."""
        runs = self.both(*program, nproc=2, address=ADDRESSES[0], spaces=SPACES, **options)
        for node, run in enumerate(runs):
            self.wait_line(run.stdout, *(f"[{2 * node + rank}] ready with" for rank in range(2)))
        nodes = []
        for space in SPACES[:2]:
            inside = os.stat(f"/run/netns/{space}").st_ino
            pids = [pid for pid in marked(self.marker)
                    if os.stat(f"/proc/{pid}/ns/net").st_ino == inside]
            ranks = [pid for pid in pids if variable(pid, "RANK") is not None]
            self.assertEqual(len(ranks), 2)
            (master,) = {(variable(pid, "MASTER_ADDR"), variable(pid, "MASTER_PORT"))
                         for pid in ranks}
            nodes.append((listening(set(pids) - set(ranks)), listening(ranks), master))
        launchers = {port for launcher, _, _ in nodes for _, port in launcher}
        ranks = {port for _, rank, _ in nodes for _, port in rank}
        closed = [f"{address}:{port}" for address in ADDRESSES
                  for port in sorted(launchers | {self.port})]
        self.assertEqual(self.knock(closed),
                         [f"{place} ConnectionRefusedError" for place in closed])
        for line in self.knock([f"{a}:{port}" for a in ADDRESSES for port in sorted(ranks)]):
            self.assertNotIn("store", line)
        self.assertEqual({address for _, _, (address, _) in nodes}, {"127.0.0.1"})
        runs[0].send_signal(signal.SIGTERM)
        return nodes, [self.finish(run)[1] for run in runs]

    def test_the_third_host_recognises_a_store(self):
        """Otherwise the rest would prove nothing."""
        server = subprocess.Popen(
            ["ip", "netns", "exec", SPACES[0], sys.executable, "-c",
             "import socket, struct\n"
             f"s = socket.create_server(('', {self.port}))\n"
             "print('up', flush=True)\n"
             "while True:\n"
             "    c = s.accept()[0]\n"
             "    c.sendall(c.recv(10)[6:])"], stdout=subprocess.PIPE, text=True)
        with server:
            self.assertEqual(server.stdout.readline(), "up\n")
            places = [f"{address}:{self.port}" for address in ADDRESSES]
            self.assertEqual(self.knock(places), [f"{place} store" for place in places])
            server.kill()

    def only_gloo(self, nodes):
        """What ranks listen on is gloo's: on the one address that leads to the other node."""
        for (_, ranks, _), own in zip(nodes, (ADDRESSES[0], OTHERS[0])):
            self.assertGreaterEqual(len(ranks), 2)
            self.assertEqual({str(address) for address, _ in ranks}, {own})

    def test_ranks_that_use_the_store_alone_open_no_port(self):
        nodes, _ = self.sockets_of(PEER, "hold")
        self.assertEqual([(launcher, ranks) for launcher, ranks, _ in nodes], [(set(), set())] * 2)

    def test_a_world_of_two_hosts(self):
        nodes, out = self.sockets_of(PEER, "world")
        self.assertIn("ready with gloo, sum 4", out[1])
        self.assertEqual([launcher for launcher, _, _ in nodes], [set(), set()])
        self.only_gloo(nodes)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_python_ranks(self):
        nodes, out = self.sockets_of(self.script(PYTHON_RANK))
        self.assertIn("ready with gloo sum 4.0", out[1])
        loopback = ipaddress.ip_address("127.0.0.1")
        for launcher, _, (_, port) in nodes:
            self.assertEqual(launcher, {(loopback, int(port))})
        self.only_gloo(nodes)

    def test_a_cable_that_is_cut_in_a_wait(self):
        runs = self.both(PEER, "endure", nproc=1, address=ADDRESSES[0], spaces=SPACES)
        for node, run in enumerate(runs):
            self.wait_line(run.stdout, f"[{node}] ready with the store")
        ip("-n", SPACES[1], "link", "set", f"y{TAG}0", "down")
        try:
            for node, run in enumerate(runs):
                code, out, err = self.finish(run)
                self.assertEqual(code, 1, err)
                self.assertRegex(out, rf"rank {node}: \[world\] waiting for never was given up: "
                                      rf"the launcher of node {1 - node} \S+ \S+ is lost")
        finally:
            ip("-n", SPACES[1], "link", "set", f"y{TAG}0", "up")


class Store(Hosts):
    def test_values_cross_intact_and_small_calls_pass_large_ones(self):
        for code, out, err in map(lambda run: self.finish(run, 120), self.both(PEER, "values")):
            self.assertEqual(code, 0, out + err)
            found = re.search(r"values intact; a small call beside them took ([0-9.]+) ms", out)
            self.assertTrue(found, out)
            print(out, end="")
            # 96 MiB in each direction take seconds.
            self.assertLess(float(found.group(1)), 100)

    def test_a_launcher_that_is_killed_in_a_wait_is_named(self):
        for victim in (0, 1):
            with self.subTest(victim=victim):
                self.port = free_port()
                runs = self.both(PEER, "endure")
                for node, run in enumerate(runs):
                    self.wait_line(run.stdout, f"[{node}] ready with the store")
                began = time.monotonic()
                runs[victim].kill()
                code, out, err = self.finish(runs[1 - victim])
                self.assertEqual(code, 1, err)
                self.assertRegex(
                    out, rf"rank {1 - victim}: \[world\] waiting for never was given up: the "
                         rf"launcher of node {victim} (on|at) \S+ is lost")
                self.assertLess(time.monotonic() - began, BOUND_S)
                self.assertEqual(self.wait_gone(), [])

    def test_a_rank_that_dies_in_a_wait_is_named_to_the_other_node(self):
        for code, out, err in map(self.finish, self.both(PEER, "wait")):
            self.assertEqual(code, 137, err)
            self.assertIn("rank 1 on", err)
            if "[0] channel there" in out:
                self.assertRegex(out, r"rank 0: \[world\] waiting for never was given up: rank 1 "
                                      r"on \S+ failed: killed by SIGKILL")

    def test_three_nodes_share_the_keys(self):
        runs = self.both(PEER, "hold", nnodes=3, nproc=2)
        for node, run in enumerate(runs):
            self.wait_line(run.stdout, f"[{2 * node}] ready", f"[{2 * node + 1}] ready")
        runs[2].send_signal(signal.SIGTERM)
        for run in runs:
            self.assertEqual(self.finish(run)[0], 143)

    def test_an_attempt_has_a_fresh_store(self):
        runs = self.both(PEER, "fresh", flags=("--max-restarts=1",))
        for code, out, err in map(self.finish, runs):
            self.assertEqual(code, 0, err)
            for attempt in range(2):
                self.assertNotIn(f"attempt {attempt} finds the key: yes", out)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_an_attempt_of_python_ranks_has_a_fresh_store(self):
        runs = self.both(self.script(FRESH), flags=("--max-restarts=1",))
        for code, out, err in map(lambda run: self.finish(run, 120), runs):
            self.assertEqual(code, 0, err)
            for attempt in range(2):
                self.assertIn(f"attempt {attempt} finds the key: False", out)
                self.assertNotIn(f"attempt {attempt} finds the key: True", out)

    def test_a_stopped_launcher_is_not_a_lost_one(self):
        """Also with as many bytes on the way to it as may be."""
        runs = self.both(PEER, "values")
        time.sleep(1)
        with open(f"/proc/{runs[0].pid}/task/{runs[0].pid}/children") as f:
            supervisor = int(f.read().split()[0])
        os.kill(supervisor, signal.SIGSTOP)
        time.sleep(6)  # longer than node_link.h's kLostAfter
        os.kill(supervisor, signal.SIGCONT)
        for code, out, err in map(lambda run: self.finish(run, 120), runs):
            self.assertEqual(code, 0, out + err)
            self.assertIn("values intact", out)


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why

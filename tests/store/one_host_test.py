"""What a run on one host opens to the network: nothing beyond loopback, and for C++ ranks over
shared memory no TCP port at all. Seen from inside (/proc/net/tcp of the run's own processes) and
from a second network namespace. Then the faults of the launcher's store."""
import contextlib
import importlib.util
import ipaddress
import os
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "launch"))
from cable import Cable  # noqa: E402
from launch_case import Case, free_port, marked  # noqa: E402

BIN = os.environ["LOCKSTEP_BIN"]
PEER = f"{BIN}/tests/store_peer"
HAVE_TORCH = importlib.util.find_spec("torch") is not None
CAN_SPLIT = (os.geteuid() == 0 and
             subprocess.run(["which", "ip"], capture_output=True).returncode == 0)
ADDRESS = "10.99.9.1"

PYTHON_RANK = r'''
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
extra = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
extra.add("here", 1)
while extra.add("here", 0) < dist.get_world_size():
    time.sleep(0.01)
print("ready with", dist.get_backend(), "sum", x[0].item(), flush=True)
time.sleep(600)
'''

FRESH = r'''
import os, sys, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "finds the key:", store.check(["left by an attempt"]), flush=True)
store.add("have looked", 1)
while store.add("have looked", 0) < 2:
    pass
store.set("left by an attempt", "1")
sys.exit(7 if attempt == "0" else 0)
'''

# Run inside the other namespace: what happens to a connection to each address and port.
KNOCK = r'''
import socket, sys
for port in sys.argv[2:]:
    with socket.socket() as s:
        s.settimeout(5)
        try:
            s.connect((sys.argv[1], int(port)))
            print(port, "connected")
        except OSError as e:
            print(port, type(e).__name__)
'''


def address_of(text):
    """An address of /proc/net/tcp{,6}: words of 32 bits in the byte order of the host."""
    raw = b"".join(int(text[i:i + 8], 16).to_bytes(4, sys.byteorder)
                   for i in range(0, len(text), 8))
    return ipaddress.ip_address(raw)


def listening(pids):
    """(address, port) of every TCP socket on which one of the processes listens."""
    inodes, rows = set(), []
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            for name in ("tcp", "tcp6"):
                with open(f"/proc/{pid}/net/{name}") as f:
                    rows += [line.split() for line in f.readlines()[1:]]
        except OSError:
            pass
    found = set()
    for row in rows:
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
            address, port = row[1].split(":")
            found.add((address_of(address), int(port, 16)))
    return found


def variable(pid, name):
    with open(f"/proc/{pid}/environ", "rb") as f:
        for entry in f.read().split(b"\0"):
            if entry.startswith(name.encode() + b"="):
                return entry.decode().split("=", 1)[1]
    return None


class Network(Case):
    @classmethod
    def setUpClass(cls):
        if CAN_SPLIT:
            cls.cable = Cable("10.99.9")
            cls.addClassCleanup(cls.cable.remove)

    def ports_of(self, *program, ranks=2, flags=("--standalone",), **env):
        """The listening sockets of a run whose ranks are all ready, and its MASTER_PORT; nobody
        reaches any of them from the other namespace."""
        prefix = self.cable.inside(0) if CAN_SPLIT else ()
        run = self.start(*flags, f"--nproc-per-node={ranks}", *program, prefix=prefix,
                         env=dict(PYTHON_EXEC=sys.executable, CUDA_VISIBLE_DEVICES="", **env))
        self.wait_line(run.stdout, *(f"[{rank}] ready with" for rank in range(ranks)))
        pids = marked(self.marker)
        self.assertGreater(len(pids), ranks)
        found = listening(pids)
        master = next(int(port) for port in (variable(pid, "MASTER_PORT") for pid in pids) if port)
        if CAN_SPLIT:
            ports = sorted({port for _, port in found} | {master})
            knocked = subprocess.run(
                [*self.cable.inside(1), sys.executable, "-c", KNOCK, ADDRESS,
                 *map(str, ports)], capture_output=True, text=True, timeout=120, check=True)
            self.assertEqual(knocked.stdout.split("\n")[:-1],
                             [f"{port} ConnectionRefusedError" for port in ports])
        else:
            print("SKIP: no second network namespace (needs root and ip)")
        for pid in pids:
            if variable(pid, "RANK") is not None:
                self.assertEqual([variable(pid, name) for name in
                                  ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")],
                                 ["127.0.0.1", "lo", "=lo"])
        run.send_signal(signal.SIGTERM)
        _, out, _ = self.finish(run)
        return found, master, out

    def only_loopback(self, found):
        self.assertEqual([str(address) for address, _ in found if not address.is_loopback], [])

    def test_the_second_namespace_reaches_what_listens_everywhere(self):
        """Otherwise a refusal would prove nothing."""
        if not CAN_SPLIT:
            self.skipTest("needs root and ip")
        port = free_port()
        with subprocess.Popen(
                [*self.cable.inside(0), sys.executable, "-c",
                 f"import socket; s = socket.create_server(('', {port})); print('up', flush=True); "
                 "s.accept()"], stdout=subprocess.PIPE, text=True) as server:
            self.assertEqual(server.stdout.readline(), "up\n")
            found = listening([server.pid])
            self.assertEqual({p for _, p in found}, {port})
            knocked = subprocess.run([*self.cable.inside(1), sys.executable, "-c", KNOCK,
                                      ADDRESS, str(port)], capture_output=True, text=True,
                                     timeout=60, check=True)
            self.assertEqual(knocked.stdout, f"{port} connected\n")

    def test_ranks_over_shared_memory_open_no_port(self):
        found, _, out = self.ports_of(PEER, "world")
        self.assertIn("ready with shm, sum 2", out)
        self.assertEqual(found, set())

    def test_ranks_over_gloo_listen_on_loopback(self):
        found, master, out = self.ports_of(PEER, "world", ranks=3, LOCKSTEP_BACKEND="gloo")
        self.assertIn("ready with gloo, sum 3", out)
        self.only_loopback(found)
        self.assertGreaterEqual(len(found), 3)  # gloo's own
        self.assertNotIn(master, {port for _, port in found})

    def test_a_given_address_and_port_change_nothing(self):
        port = free_port()
        found, master, _ = self.ports_of(
            PEER, "world", flags=(f"--master-addr={ADDRESS}", f"--master-port={port}"))
        self.assertEqual((found, master), (set(), port))

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_python_ranks_listen_on_loopback(self):
        script = os.path.join(self.dir.name, "rank.py")
        with open(script, "w") as f:
            f.write(PYTHON_RANK)
        found, master, out = self.ports_of(script)
        self.assertIn("ready with gloo sum 2.0", out)
        self.only_loopback(found)
        self.assertIn((ipaddress.ip_address("127.0.0.1"), master), found)

    def test_ranks_by_hand_at_a_loopback_address_listen_on_loopback(self):
        port = free_port()
        ranks = []
        for rank in range(2):
            env = self.environment(RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, MASTER_PORT=port,
                                   MASTER_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="",
                                   LOCKSTEP_BACKEND="gloo")
            for name in [n for n in env if n.startswith("TORCHELASTIC_")]:
                del env[name]
            ranks.append(subprocess.Popen([PEER, "world"], stdout=subprocess.PIPE, text=True,
                                          env=env, stdin=subprocess.DEVNULL))
        self.started += ranks
        for rank in ranks:
            self.wait_line(rank.stdout, "ready with gloo")
        found = listening(marked(self.marker))
        self.only_loopback(found)
        self.assertIn(port, {number for _, number in found})


class Store(Case):
    def test_a_rank_that_waits_learns_which_one_died(self):
        began = time.monotonic()
        code, out, err = self.run_ranks(2, PEER, "wait")
        self.assertEqual(code, 137, err)
        self.assertRegex(out, r"rank 0: \[world\] waiting for never was given up: rank 1 on \S+ "
                              r"failed: killed by SIGKILL")
        self.assertIn("rank 1 on", err)
        self.assertLess(time.monotonic() - began, 40)  # of the 60 s that it would have waited

    def test_a_killed_launcher_ends_the_waiting_ranks(self):
        run = self.start("--standalone", "--nproc-per-node=2", PEER, "world")
        self.wait_line(run.stdout, "[0] ready", "[1] ready")
        run.kill()
        run.wait()
        self.assertEqual(self.wait_gone(), [])

    def test_an_attempt_has_a_fresh_store(self):
        for flags in ((), (f"--master-port={free_port()}",)):
            run = self.start("--nproc-per-node=2", "--max-restarts=1", *flags, PEER, "fresh")
            code, out, err = self.finish(run)
            self.assertEqual(code, 0, err)
            self.assertIn("attempt 0 finds the key: no", out)
            self.assertIn("attempt 1 finds the key: no", out)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_an_attempt_of_python_ranks_has_a_fresh_store(self):
        script = os.path.join(self.dir.name, "fresh.py")
        with open(script, "w") as f:
            f.write(FRESH)
        run = self.start("--nproc-per-node=2", "--max-restarts=1",
                         f"--master-port={free_port()}", script,
                         env={"PYTHON_EXEC": sys.executable})
        code, out, err = self.finish(run, 120)
        self.assertEqual(code, 0, err)
        self.assertIn("attempt 0 finds the key: False", out)
        self.assertIn("attempt 1 finds the key: False", out)
        self.assertNotIn("attempt 1 finds the key: True", out)

    def test_a_child_of_a_rank_does_not_have_the_channel(self):
        code, out, err = self.run_ranks(2, PEER, "parent")
        self.assertEqual(code, 0, err)
        for rank in range(2):
            self.assertEqual([line for line in out.splitlines() if line.startswith(f"[{rank}]")],
                             [f"[{rank}] channel there", f"[{rank}] channel not there"])

    def test_through_a_shell_that_closes_descriptors_the_store_is_reached_by_tcp(self):
        """A Python parent closes what it does not know; its child still finds its world."""
        code, out, err = self.run_ranks(
            2, "--no-python", sys.executable, "-c",
            f"import subprocess; print(subprocess.run(['{BIN}/examples/01_hello_world'], "
            "capture_output=True, text=True, timeout=60).stdout, flush=True)",
            env={"CUDA_VISIBLE_DEVICES": ""})
        self.assertEqual(code, 0, err)
        self.assertEqual(len([line for line in out.splitlines() if "of 2" in line]), 2, out + err)


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why

"""Python scripts written for torchrun, unchanged under `lockstep run`; and many jobs at once."""
import importlib.util
import os
import socket
import sys
import unittest
import venv

from launch_case import SOAK, Case, free_port

HAVE_TORCH = importlib.util.find_spec("torch") is not None

GLOO = r'''
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x.tolist() == [dist.get_world_size() * (dist.get_world_size() + 1) / 2] * 4
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("sum", x[0].item(), "attempt", attempt, flush=True)
if len(sys.argv) > 1 and attempt < int(sys.argv[1]):
    if dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()
    time.sleep(300)
dist.destroy_process_group()
'''

# A client of the launcher's store, without the seconds that importing torch takes: every rank sets
# its job and reads what the others have set.
RENDEZVOUS = r'''
import os, socket, struct, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, job = int(os.environ["MASTER_PORT"]), os.environ["JOB"].encode()
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
VALIDATE, SET, GET, WAIT = 0, 1, 3, 6
def piece(data):
    return struct.pack("=Q", len(data)) + data
def receive(count):
    data = b""
    while len(data) < count:
        more = s.recv(count - len(data))
        assert more
        data += more
    return data
end = time.monotonic() + 30
while True:
    try:
        s = socket.create_connection((os.environ["MASTER_ADDR"], port), 30)
        if s.getsockname() != s.getpeername():
            break
    except OSError:
        assert time.monotonic() < end
    time.sleep(0.01)
s.sendall(struct.pack("=BI", VALIDATE, 0x3C85F7CE))
s.sendall(bytes([SET]) + piece(b"%d" % rank) + piece(job))
for other in range(size):
    key = piece(b"%d" % other)
    s.sendall(bytes([WAIT]) + struct.pack("=Q", 1) + key)
    assert receive(1) == b"\0"
    s.sendall(bytes([GET]) + key)
    assert receive(struct.unpack("=Q", receive(8))[0]) == job
'''

# Somebody who wants to answer the ranks at MASTER_PORT: every address a client could mean.
IMPOSTOR = r'''
import os, socket
port = int(os.environ["MASTER_PORT"])
assert os.environ["RANK"] == "0"
for host in ("127.0.0.1", "0.0.0.0", "::1", "::"):
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        s.bind((host, port))
        s.listen()
        print(host, "taken", flush=True)
    except OSError as error:
        print(host, error.strerror, flush=True)
'''


class PythonRanks(Case):
    def program(self, text):
        path = os.path.join(self.dir.name, "program.py")
        with open(path, "w") as f:
            f.write(text)
        return path

    def jobs(self, program, count, ranks, *arguments, bound_s=480):
        processes = [self.start("--standalone", f"--nproc-per-node={ranks}", program, *arguments,
                                env={"JOB": f"job{i}", "PYTHON_EXEC": sys.executable})
                     for i in range(count)]
        for process in processes:
            code, _, err = self.finish(process, bound_s)
            self.assertEqual(code, 0, err)

    def test_many_jobs_at_once(self):
        program = self.program(RENDEZVOUS)
        for _ in range(20 if SOAK else 2):
            self.jobs(program, 8, 2)

    def test_a_requested_port_survives_restarts(self):
        port = free_port()
        program = self.program(RENDEZVOUS + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(7)
""")
        process = self.start("--nproc-per-node=2", f"--master-port={port}", "--max-restarts=1",
                             program, env={"JOB": "x", "PYTHON_EXEC": sys.executable})
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertIn("exited with code 7", err)

    def test_a_name_of_the_loopback_reaches_the_ranks_as_it_was_given(self):
        """And the launcher answers at whatever address a client takes it for."""
        program = self.program(RENDEZVOUS + """
for family, *_, address in socket.getaddrinfo(os.environ["MASTER_ADDR"], port, type=1):
    socket.create_connection(address[:2], 30).close()
print("MASTER_ADDR is", os.environ["MASTER_ADDR"], flush=True)
""")
        for given, expected in (("localhost", "localhost"), ("127.0.0.1", "127.0.0.1"),
                                (None, "127.0.0.1"), ("10.1.2.3", "127.0.0.1")):
            with self.subTest(given=given):
                flags = (f"--master-addr={given}",) if given else ()
                process = self.start("--nproc-per-node=2", *flags, program,
                                     env={"JOB": "x", "PYTHON_EXEC": sys.executable})
                code, out, err = self.finish(process)
                self.assertEqual(code, 0, err)
                self.assertEqual(out.count(f"MASTER_ADDR is {expected}\n"), 2, out)

    def test_nobody_else_can_listen_at_the_port(self):
        """Without python at the front the launcher begins to serve it a second later."""
        program = self.program(IMPOSTOR)
        for flags in ((), (f"--master-port={free_port()}",)):
            for command in ((program,),
                            ("--no-python", "bash", "-c", f"{sys.executable} {program}")):
                with self.subTest(flags=flags, command=command):
                    process = self.start("--nproc-per-node=1", *flags, *command,
                                         env={"PYTHON_EXEC": sys.executable})
                    code, out, err = self.finish(process)
                    self.assertEqual(code, 0, err)
                    self.assertEqual(out.count("\n"), 4, out)
                    self.assertNotIn("taken", out)

    def test_a_second_job_on_a_port_is_refused_by_name(self):
        port = free_port()
        script = "echo $$ > $NOTES/up.$RANK; while [ ! -e $NOTES/go.0 ]; do sleep 0.05; done"
        flags = ("--nproc-per-node=1", "--no-python", "bash", "-c", script)
        first = self.start(f"--master-port={port}", *flags)
        pid = self.wait_notes("up", 1)[0]
        for flag in (f"--master-port={port}", f"--rdzv-endpoint=localhost:{port}"):
            code, out, err = self.finish(self.start(flag, *flags))
            self.assertEqual((code, out), (2, ""), err)
            # Before and after its launcher listens.
            self.assertRegex(err, rf"--master-port={port} cannot be used: "
                                  rf"(another job has it: pid {pid} \(\S*bash -c .*\) was started "
                                  rf"with MASTER_PORT={port}|pid \d+ \(.*lockstep run .*\) "
                                  rf"listens there)\. Choose another port")
        open(os.path.join(self.notes, "go.0"), "w").close()
        code, _, err = self.finish(first)
        self.assertEqual(code, 0, err)
        self.assertEqual(err, "")

    def test_a_port_that_is_free_in_a_moment_is_waited_for(self):
        """The ranks of a launcher that was killed have it until they are killed, too."""
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            process = self.start(f"--master-port={port}", "--nproc-per-node=1", "--no-python",
                                 "true")
            self.wait_line(process.stderr, f"--master-port={port} is in use; waiting up to 5 s")
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)

    def test_an_interpreter_without_torch_is_named(self):
        """The python3 of PATH is often not the one that has torch; PYTHON_EXEC chooses."""
        plain = os.path.join(self.dir.name, "plain")
        venv.create(plain, symlinks=True)
        env = {"PYTHON_EXEC": os.path.join(plain, "bin", "python3"), "PYTHONPATH": "",
               "PYTHONNOUSERSITE": "1"}
        code, _, err = self.run_ranks(2, self.program("import torch\n"), env=env)
        self.assertEqual(code, 1, err)
        self.assertIn("No module named 'torch'", err)
        self.assertEqual(err.count("export PYTHON_EXEC="), 1, err)
        self.assertIn(f"{env['PYTHON_EXEC']}, which ran the script, has no module torch", err)
        code, _, err = self.run_ranks(2, self.program("print(1)\n"), env=env)
        self.assertEqual(code, 0, err)
        self.assertNotIn("PYTHON_EXEC", err)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_an_interpreter_with_torch_is_not(self):
        code, _, err = self.run_ranks(1, self.program("import no_such_module\n"),
                                      env={"PYTHON_EXEC": sys.executable})
        self.assertEqual(code, 1, err)
        self.assertNotIn("export PYTHON_EXEC", err)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_gloo_and_a_restart_with_a_fresh_store(self):
        code, out, err = self.run_ranks(3, self.program(GLOO), "1", flags=("--max-restarts=1",),
                                        bound_s=480, env={"PYTHON_EXEC": sys.executable})
        self.assertEqual(code, 0, err)
        self.assertIn("rank 1 on", err)
        self.assertIn("[1] sum 6.0 attempt 0\n", out)
        self.assertEqual(sorted(line for line in out.splitlines() if "attempt 0" not in line),
                         [f"[{r}] sum 6.0 attempt 1" for r in range(3)])

    @unittest.skipUnless(HAVE_TORCH and SOAK, "needs torch and the long run")
    def test_many_gloo_jobs_at_once(self):
        program = self.program(GLOO)
        for _ in range(20):
            self.jobs(program, 8, 2, bound_s=1200)


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why

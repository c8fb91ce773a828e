"""Python scripts written for torchrun, unchanged under `lockstep run`; and many jobs at once."""
import importlib.util
import os
import sys
import unittest

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

# What a store does, without the seconds that importing torch takes: rank 0 binds the port as c10d
# does, either by itself or on the descriptor it was handed, and all others connect.
MEET = r'''
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, job = int(os.environ["MASTER_PORT"]), os.environ["JOB"].encode()
if rank == 0:
    if sys.argv[1] == "handed":
        server = socket.socket(fileno=int(os.environ["LOCKSTEP_STORE_FD"]))
        assert server.getsockname()[1] == port
    else:
        server = socket.socket(socket.AF_INET6)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port))
    time.sleep(0.05)
    server.listen()
    for _ in range(size - 1):
        peer = server.accept()[0]
        assert peer.recv(100) == job
        peer.sendall(b"ok")
else:
    end = time.monotonic() + 30
    while True:
        try:
            s = socket.create_connection(("127.0.0.1", port))
            if s.getsockname() != s.getpeername():
                break
        except OSError:
            assert time.monotonic() < end
        time.sleep(0.01)
    s.sendall(job)
    assert s.recv(2) == b"ok"
'''


class PythonRanks(Case):
    def program(self, text):
        path = os.path.join(self.dir.name, "program.py")
        with open(path, "w") as f:
            f.write(text)
        return path

    def jobs(self, program, count, ranks, *arguments, bound_s=120):
        processes = [self.start("--standalone", f"--nproc-per-node={ranks}", program, *arguments,
                                env={"JOB": f"job{i}", "PYTHON_EXEC": sys.executable})
                     for i in range(count)]
        for process in processes:
            code, _, err = self.finish(process, bound_s)
            self.assertEqual(code, 0, err)

    def test_many_jobs_at_once(self):
        program = self.program(MEET)
        for _ in range(20 if SOAK else 2):
            for how in ("handed", "bound"):
                self.jobs(program, 8, 2, how)

    def test_an_asked_port_over_restarts(self):
        port = free_port()
        program = self.program(MEET + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(7)
""")
        process = self.start("--nproc-per-node=2", f"--master-port={port}", "--max-restarts=1",
                             program, "handed", env={"JOB": "x", "PYTHON_EXEC": sys.executable})
        code, _, err = self.finish(process)
        self.assertEqual(code, 0, err)
        self.assertIn("exited with code 7", err)

    @unittest.skipUnless(HAVE_TORCH, "needs torch")
    def test_gloo_and_a_restart_with_a_fresh_store(self):
        code, out, err = self.run_ranks(3, self.program(GLOO), "1", flags=("--max-restarts=1",),
                                        bound_s=120, env={"PYTHON_EXEC": sys.executable})
        self.assertEqual(code, 0, err)
        self.assertIn("rank 1 on", err)
        self.assertIn("[1] sum 6.0 attempt 0\n", out)
        self.assertEqual(sorted(line for line in out.splitlines() if "attempt 0" not in line),
                         [f"[{r}] sum 6.0 attempt 1" for r in range(3)])

    @unittest.skipUnless(HAVE_TORCH and SOAK, "needs torch and the long run")
    def test_many_gloo_jobs_at_once(self):
        program = self.program(GLOO)
        for _ in range(20):
            self.jobs(program, 8, 2, bound_s=300)


if __name__ == "__main__":
    unittest.main(verbosity=2)  # a skipped test says why

"""What the tests of the dashboard share: a scripted run, its server, and requests byte by byte."""

import json
import math
import os
import pathlib
import random
import re
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.parse

BIN = pathlib.Path(os.environ["LOCKSTEP_BIN"])
SOURCE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"])
PEER = BIN / "tests" / "server_peer"
LOCKSTEP = BIN / "lockstep"
BOUND_S = 60  # says that nothing hangs: a busy machine may hold up any process for seconds
GIB = 1 << 30


def state(step=120, *, ranks=2, gpus=False, failed=None, run_state="running", log=None, series=None,
          findings=(), stall=None):
    """A state as `lockstep run --dashboard` serves it (docs/dashboard.md)."""
    rng = random.Random(step)
    now = time.time()
    budget = {"data": 0.06, "forward": 0.27, "backward": 0.46, "communication": 0.11,
              "optimizer": 0.07, "logging": 0.03}
    table = []
    slow = {f["rank"] for f in findings if f.get("cause") == "data"}
    for rank in range(ranks):
        dead = rank == failed
        shares = dict(budget)
        if slow:  # that rank waits for its batches, the others wait for that rank
            shares["data" if rank in slow else "communication"] += 0.25
            shares["forward"] -= 0.09
            shares["backward"] -= 0.16
        table.append({
            "rank": rank, "host": 0, "pid": 4100 + rank,
            "state": "failed" if dead else "running" if run_state == "running" else run_state,
            "exit": "killed by SIGKILL" if dead else "", "step": step,
            "step_ms": round(21.5 + rng.uniform(-0.2, 0.2), 2),
            "phase": ["forward", "backward", "communication"][(step + rank) % 3],
            "budget": {} if dead else shares,
            "cores": round(1 + rng.uniform(-0.03, 0.03), 3),
            "resident_bytes": int(1.9 * GIB) + rank * 4_000_000, "threads": 14,
            "gpu": {"index": rank, "utilisation_percent": (73 if slow else 97) - 2 * rank,
                    "memory_used_bytes": (58 + rank) * GIB, "memory_total_bytes": 80 * GIB,
                    "power_w": 612.0 - 9 * rank} if gpus else None,
            "position": {"operation": "all_reduce", "sequence": 9 * step - (rank in slow),
                         "state": "finished" if rank in slow else "started", "age_s": 0.004},
        })
    curve = range(max(1, step - 499), step + 1)
    loss = [[s, 1.9 + 8.6 * math.exp(-s / 45) + 0.05 * math.sin(s * 1.7)] for s in curve]
    rate = [[s, 381_000 * (1 - math.exp(-s / 6)) + 4000 * math.sin(s)] for s in curve]
    times = [[s, 21.5 + 12 * math.exp(-s / 5) + 0.6 * math.sin(s * 2.3)] for s in curve]
    logged = {"loss": loss, "eval_loss": [[s, v + 0.2] for s, v in loss if s % 20 == 0],
              "learning_rate": [[s, 3e-4 * min(1, s / 40)] for s in curve],
              "grad_norm": [[s, 1 + 3 * math.exp(-s / 30) + 0.1 * math.sin(s * 3.1)]
                            for s in curve],
              "tokens_per_second": rate, "samples_per_second": [[s, v / 1024] for s, v in rate],
              "step_ms": times}
    lines = {str(r): [f"step {s}: loss {v:.4f}" for s, v in loss[-50:]] for r in range(ranks)}
    if failed is not None:
        lines[str(failed)].append("terminate called after throwing an instance of 'c10::Error'")
    return {
        "time": now,
        "run": {"id": "tiny-gpt-4f21", "world_size": ranks, "started": now - 3 * step, "attempt": 0,
                "state": "failed" if failed is not None else run_state,
                "message": f"Rank {failed} on this host failed: killed by SIGKILL."
                           if failed is not None else "",
                "recorded": False, "total_steps": 1000,
                "left_s": 3.0 * (1000 - step) if run_state == "running" and failed is None
                          else None},
        "ranks": table,
        "series": series or {name: points for name, points in logged.items() if points},
        "log": log or lines,
        "findings": list(findings),
        "verdict": {"healthy": run_state == "running" and not stall,
                    "text": "" if findings else "Nothing can be judged while no step ends."
                            if stall else "Nothing found that slows this run down."},
        "stall": {"seconds": 12.4, "what": stall} if stall else None,
        "stall_table": {"time": now, "text": f"[launch] stall: {stall}\n  1  T stopped"}
                       if stall else None,
    }


FINDING = {
    "rule": "loader-bound", "rank": 1, "cause": "data",
    "what": "Rank 1 waits for its batches in every step, and the others wait for rank 1.",
    "evidence": "6.2 ms of each 21.5 ms step are data wait; its loader makes 46 batches a second",
    "remedy": "dataloader_num_workers: 4 (now 1)", "gain": 0.24,
}


class Server:
    """server_peer with a state that the test sets."""

    def __init__(self, *args):
        self.process = subprocess.Popen([PEER, *map(str, args)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.set(state())
        self.url = self.process.stdout.readline().strip()
        parts = urllib.parse.urlsplit(self.url)
        self.port = parts.port
        self.token = urllib.parse.parse_qs(parts.query)["token"][0]

    def set(self, value):
        self.process.stdin.write((value if isinstance(value, str) else json.dumps(value)) + "\n")
        self.process.stdin.flush()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=BOUND_S)

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=BOUND_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def connect(self, timeout=BOUND_S):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def request(self, path, *, method="GET", host=None, headers=(), token=True, body=b""):
        """(status, headers in lower case, body) of one request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *headers]
        if token:
            lines.append(f"Authorization: Bearer {self.token}")
        return self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    def raw(self, data):
        with self.connect() as s:
            s.sendall(data)
            return parse(read_to_end(s))


def read_to_end(s):
    data = b""
    try:
        while piece := s.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass  # the server closed with bytes of ours unread
    return data


def parse(data):
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers.setdefault(name.lower(), value.strip())
    return (int(lines[0].split()[1]) if lines[0] else 0), headers, body


class Events:
    """The stream of /events, chunk by chunk."""

    def __init__(self, server, path="/events"):
        self.socket = server.connect()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
                            f"Authorization: Bearer {server.token}\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        self.headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self.text = b""

    def next(self):
        """(type, data) of the next event; None at the end of the stream."""
        while b"\n\n" not in self.text:
            size = int(self.file.readline() or b"0", 16)
            self.text += self.file.read(size)
            self.file.readline()
            if size == 0:
                return None
        event, _, self.text = self.text.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
        return fields.get("event", "message"), json.loads(fields["data"])

    def close(self):
        self.file.close()
        self.socket.close()


class Report:
    """The page that a command has written to a file: its state, by what a reader looks for."""

    def __init__(self, path):
        text = pathlib.Path(path).read_text(encoding="utf-8")
        assert "default-src 'none'; script-src 'sha256-" in text
        data = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
        assert len(data) == 1 and text.count("<script") == 2, "names are not markup"
        assert not re.search(r"https?:|url\(|@import|(src|href)=.?/",
                             text.replace("http://www.w3.org/2000/svg", "").replace(data[0], ""))
        self.text = data[0]
        self.state = json.loads(data[0])
        self.tables = {table["title"]: table for table in self.state["tables"]}
        self.charts = {chart["title"]: chart for chart in self.state.get("charts", [])}

    def row(self, title, first):
        """The other cells of the one row that begins so."""
        row, = [row for row in self.tables[title]["rows"] if row[0] == first]
        return row[1:]


def environment(**more):
    ours = r"RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|LOCKSTEP_(?!BIN|SOURCE|PYTHON)"
    env = {k: v for k, v in os.environ.items() if not re.match(ours, k)}
    return {**env, "LOCKSTEP_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **more}


class ReportCase(unittest.TestCase):
    """Commands in a folder of their own."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="lockstep-report-")
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)

    def lockstep(self, *arguments, code=0):
        done = subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True,
                              timeout=4 * BOUND_S, env=environment(), check=False, cwd=self.place,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done


class DashboardCase(unittest.TestCase):
    def serve(self, *args):
        server = Server(*args)
        self.addCleanup(lambda: server.process.poll() is None and server.kill())
        return server

    def eventually(self, condition, what):
        deadline = time.monotonic() + BOUND_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)

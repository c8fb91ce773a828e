"""A real SLURM of two nodes on this machine, and our program as its tasks.

Needs Debian's munge, slurmctld, slurmd and slurm-client, which `./dev test --all` installs; without
them the test is skipped (77). Everything it starts runs in the foreground as its own child and the
user of the test, and is ended by its process id, or with the test.
"""

import ctypes
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from peer import (HELLO, LOCKSTEP, RUN_PEER, environment, free_port, hello_lines, run,
                  world_of)

TEMPLATE = pathlib.Path(os.environ["LOCKSTEP_SOURCE"], "examples", "slurm", "train.sbatch")

TOOLS = ["munged", "slurmctld", "slurmd", "sinfo", "srun", "sbatch", "scontrol"]

# Nodes are named by addresses, so that "the first host of the node list" resolves anywhere.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def which(tool):
    return shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def die_with_us(libc=ctypes.CDLL(None)):
    """In a daemon before it begins: it is killed when the test is."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_ports(count):
    ports = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


class Cluster:
    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lockstep_slurm_"))
        self.daemons = []
        self.log = open(self.folder / "daemons.log", "w")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "state").mkdir()
        config = self.folder / "slurm.conf"
        config.write_text(CONFIG.format(host=socket.gethostname(), folder=self.folder,
                                        user=pwd.getpwuid(os.geteuid()).pw_name,
                                        ports=free_ports(3)))
        self.config = str(config)
        munge = {name: f"{self.folder}/{file}" for name, file in [
            ("key", "munge.key"), ("socket", "munge.sock"), ("pid", "munged.pid"),
            ("log", "munged.log"), ("seed", "munge.seed")]}
        self.start("munged", "--foreground", "--force", f"--key-file={munge['key']}",
                   f"--socket={munge['socket']}", f"--pid-file={munge['pid']}",
                   f"--log-file={munge['log']}", f"--seed-file={munge['seed']}")
        self.wait_for(lambda: (self.folder / "munge.sock").exists())
        self.start("slurmctld", "-D", "-i")
        for node in ("127.0.0.1", "127.0.0.2"):
            self.start("slurmd", "-D", "-N", node)
        self.wait_for(lambda: run([which("sinfo"), "-h", "-o", "%D %t"],
                                  SLURM_CONF=self.config).out.strip() == "2 idle")

    def start(self, tool, *args):
        self.daemons.append(subprocess.Popen(
            [which(tool), *args], env=environment(SLURM_CONF=self.config), cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, preexec_fn=die_with_us))

    def wait_for(self, condition, limit_s=480):
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                text = (self.folder / "daemons.log").read_text()
                self.stop()
                raise AssertionError(f"SLURM did not come up:\n{text[-4000:]}")
            time.sleep(0.2)

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.stop)

    def srun(self, *args):
        done = run([which("srun"), *args], SLURM_CONF=self.cluster.config)
        self.assertEqual(done.code, 0, done.text())
        return hello_lines(done.out), done

    def test_one_node(self):
        lines, done = self.srun("-N1", "-n2", HELLO)
        self.assertEqual(lines, world_of(2), done.text())

    def test_two_nodes(self):
        lines, done = self.srun("-N2", "-n3", HELLO)
        self.assertEqual([(rank, size, local) for rank, size, local, _, _ in lines],
                         [(0, 3, 0), (1, 3, 1), (2, 3, 0)], done.text())

    def test_a_batch_script(self):
        folder = self.cluster.folder
        script = folder / "job.sh"
        script.write_text("#!/bin/bash\n"
                          f"{HELLO} > alone.txt\n"
                          f"srun {HELLO} > tasks.txt\n"
                          f"{LOCKSTEP} run --standalone --nproc-per-node=2 {HELLO} > run.txt\n")
        done = run([which("sbatch"), "-W", "-N1", "-n3", "-D", str(folder), "-o",
                    str(folder / "job.out"), str(script)], SLURM_CONF=self.cluster.config)
        self.assertEqual(done.code, 0, done.text() + (folder / "job.out").read_text())
        read = {name: hello_lines((folder / f"{name}.txt").read_text())
                for name in ("alone", "tasks", "run")}
        self.assertEqual(read["alone"], [(0, 1, 0, "cpu", "single")])
        self.assertEqual(read["tasks"], world_of(3))
        self.assertEqual(read["run"], world_of(2))

    def launcher(self, *flags):
        """Arguments of srun for a shell task: `lockstep run` on two nodes with two ranks each."""
        return ["-N2", "-n2", "--ntasks-per-node=1", "bash", "-c",
                'exec "$0" run --nproc-per-node=2 ' + " ".join(flags) + ' "$1"', LOCKSTEP, HELLO]

    def test_lockstep_run_as_tasks(self):
        port = free_ports(1)[0]
        lines, done = self.srun(*self.launcher(
            "--nnodes=$SLURM_STEP_NUM_NODES", "--node-rank=$SLURM_NODEID",
            "--master-addr=127.0.0.1", f"--master-port={port}"))
        # Both nodes are this machine, but the launchers count them as two: local ranks start again.
        self.assertEqual([line[:3] for line in lines],
                         [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)], done.text())
        self.assertNotIn("a world of its own", done.text())

    def test_launchers_without_nnodes_print_a_warning(self):
        lines, done = self.srun(*self.launcher())
        self.assertEqual(lines, sorted(world_of(2) * 2), done.text())
        self.assertEqual(done.text().count("srun started this launcher on 2 nodes"), 2, done.text())

    def submit(self, *args, **variables):
        """The batch script of examples/slurm, in a folder of its own: (exit code, its log)."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.cluster.folder))
        (folder / "runs").mkdir()
        done = run([which("sbatch"), "-W", "-D", str(folder), str(TEMPLATE), *args],
                   SLURM_CONF=self.cluster.config, LOCKSTEP=LOCKSTEP, NPROC_PER_NODE=2,
                   **variables)
        logs = list((folder / "runs").glob("ddp_training_*.log"))
        self.assertEqual(len(logs), 1, done.text())
        return done.code, logs[0].read_text()

    def test_the_batch_script(self):
        code, log = self.submit(HELLO)
        self.assertEqual(code, 0, log)
        self.assertRegex(log, r"^job \d+ on 127\.0\.0\.\[1-2\], rendezvous at 127\.0\.0\.1:\d+: ")
        self.assertEqual([line[:3] for line in hello_lines(log)],
                         [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)], log)

    def test_the_batch_script_fails_with_its_program(self):
        code, log = self.submit(RUN_PEER, "throw", "3")
        self.assertNotEqual(code, 0, log)
        self.assertIn("rank 3", log)

    def test_the_batch_script_without_a_program(self):
        code, log = self.submit()
        self.assertEqual(code, 2, log)
        self.assertIn("usage: sbatch", log)


if __name__ == "__main__":
    if not all(which(tool) for tool in TOOLS):
        print("SKIP: needs Debian's munge, slurmctld, slurmd and slurm-client")
        sys.exit(77)
    unittest.main(verbosity=2)

"""One binary, every launcher: alone, lockstep run, torchrun, mpirun, by hand, SLURM's variables."""

import json
import os
import re
import tempfile
import unittest

from peer import (HAVE_TORCH, HELLO, LOCKSTEP, TORCHRUN, Started, free_port, hello_lines, mpirun,
                  run, world_of)


class Peers(unittest.TestCase):
    def check(self, done, size):
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(hello_lines(done.out), world_of(size), done.text())

    def test_alone(self):
        done = run([HELLO])
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(hello_lines(done.out), [(0, 1, 0, "cpu", "single")], done.text())
        self.assertRegex(done.err, r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} info \[world\] "
                         r"WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 device=cpu backend=single \(alone; ")

    def test_lockstep_run(self):
        done = run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", HELLO])
        self.check(done, 2)
        # The start-up line is INFO, which is rank 0's; with debug every rank says its own.
        self.assertIn("[world] WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 device=cpu backend=shm "
                      "(lockstep run; ", done.err)
        self.assertEqual(done.err.count("shm"), 1, "said twice:\n" + done.err)
        self.assertNotIn("RANK=1 LOCAL_RANK=1", done.err)
        done = run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=3", HELLO],
                   LOCKSTEP_LOG="debug")
        self.check(done, 3)
        for rank in range(3):
            self.assertIn(f"WORLD_SIZE=3 RANK={rank} LOCAL_RANK={rank} device=cpu", done.err)

    def test_lockstep_run_through_a_shell(self):
        # The descriptors pass through the shell to the program.
        self.check(run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", "bash", "-c",
                        f"true; {HELLO}"]), 2)

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_the_documents_torchrun(self):
        source = os.environ["LOCKSTEP_SOURCE"]
        with open(os.path.join(source, "docs/launching.md"), encoding="utf-8") as f:
            (line,) = re.findall(r"^\./dev python (.*)$", f.read(), re.MULTILINE)
        args = line.split()
        self.assertEqual(args[-1], "build/bin/examples/01_hello_world")
        for arg in (*TORCHRUN[1:], "--standalone", "--nproc-per-node=2", "--no-python"):
            self.assertIn(arg, args)
        self.check(run([os.path.join(source, "dev"), "python", *args[:-1], HELLO]), 2)

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_torchrun_static(self):
        self.check(run([*TORCHRUN, "--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1",
                        f"--master-port={free_port()}", "--nproc-per-node=2", "--no-python",
                        HELLO]), 2)

    @unittest.skipUnless(HAVE_TORCH, "needs torch in LOCKSTEP_PYTHON")
    def test_torchrun_inside_lockstep_run_is_torchrun(self):
        # Both have the same id, as when PET_RDZV_ID is set for the whole job.
        done = run([LOCKSTEP, "run", "--rdzv-id=same", "--no-python", *TORCHRUN, "--rdzv-id=same",
                    "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--no-python",
                    LOCKSTEP, "env", "--json"])
        self.assertEqual(done.code, 0, done.text())
        found = json.loads(re.search(r'{"version".*', done.out).group())
        self.assertEqual(found["variables"]["LOCKSTEP_RUN"], "same")
        self.assertEqual(found["variables"]["TORCHELASTIC_RUN_ID"], "same")
        self.assertEqual(found["identity"]["source"], "torchrun")

    def test_mpirun_twice_at_once(self):
        command = mpirun()
        if command is None:
            self.skipTest("mpirun is not installed")
        jobs = []
        for size in (2, 3):
            # Two Open MPI jobs that make the directory of their host at the same moment fail by
            # themselves; each gets its own.
            own = tempfile.TemporaryDirectory(prefix="lockstep-mpi-")
            self.addCleanup(own.cleanup)
            jobs.append(Started([*command, "--mca", "orte_tmpdir_base", own.name, "-np", str(size),
                                 HELLO]))
        for job, size in zip(jobs, (2, 3)):
            self.check(job.finish(), size)

    def test_mpirun_with_a_master(self):
        command = mpirun()
        if command is None:
            self.skipTest("mpirun is not installed")
        self.check(run([*command, "-np", "2", HELLO], MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=free_port()), 2)

    def test_mpirun_with_a_stale_rank_variable(self):
        command = mpirun()
        if command is None:
            self.skipTest("mpirun is not installed")
        done = run([*command, "-np", "2", HELLO], RANK=0, WORLD_SIZE=1)
        self.assertNotEqual(done.code, 0)
        self.assertIn("RANK=0 and WORLD_SIZE=1 are set, but mpirun says", done.err)

    def test_lockstep_run_inside_mpirun(self):
        command = mpirun()
        if command is None:
            self.skipTest("mpirun is not installed")
        self.check(run([*command, "-np", "1", LOCKSTEP, "run", "--standalone",
                        "--nproc-per-node=2", HELLO]), 2)

    def by_hand(self, size, **more):
        ranks = [Started([HELLO], RANK=rank, WORLD_SIZE=size,
                         **{k: v(rank) if callable(v) else v for k, v in more.items()})
                 for rank in range(size)]
        for rank in ranks:
            rank.finish()
            self.assertEqual(rank.code, 0, rank.text())
        return hello_lines("\n".join(rank.out for rank in ranks))

    def test_by_hand(self):
        self.assertEqual(self.by_hand(2, LOCAL_RANK=lambda rank: rank, MASTER_ADDR="127.0.0.1",
                                      MASTER_PORT=free_port()), world_of(2))

    def test_by_hand_without_a_local_rank(self):
        self.assertEqual(self.by_hand(3, MASTER_PORT=free_port()), world_of(3))

    def test_kubernetes(self):
        # Pods have no local rank; those on one host (as here) find it by counting.
        lines = self.by_hand(2, KUBERNETES_SERVICE_HOST="10.0.0.1", MASTER_ADDR="localhost",
                             MASTER_PORT=free_port())
        self.assertEqual(lines, world_of(2))

    def test_accelerate(self):
        # What `accelerate launch` leaves in the environment of its ranks on CPU.
        self.assertEqual(
            self.by_hand(2, LOCAL_RANK=lambda rank: rank, LOCAL_WORLD_SIZE=2,
                         MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
                         ACCELERATE_USE_CPU="True", ACCELERATE_MIXED_PRECISION="no"), world_of(2))

    def srun_variables(self, rank, size):
        return {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 2, "SLURM_PROCID": rank,
                "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_NUM_TASKS": size,
                "SLURM_NTASKS": size, "SLURM_STEP_NUM_NODES": 1,
                "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_NODELIST": "no-such-host"}

    def test_variables_of_srun(self):
        ranks = [Started([HELLO], **self.srun_variables(rank, 2)) for rank in range(2)]
        self.assertEqual([rank.finish().code for rank in ranks], [0, 0],
                         "\n".join(rank.text() for rank in ranks))
        self.assertEqual(hello_lines("".join(rank.out for rank in ranks)), world_of(2))

    def test_variables_of_an_sbatch_script(self):
        done = run([HELLO], SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NTASKS=4)
        self.assertEqual(hello_lines(done.out), [(0, 1, 0, "cpu", "single")], done.text())
        self.check(run([LOCKSTEP, "run", "--standalone", "--nproc-per-node=2", HELLO],
                       SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NTASKS=4), 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)

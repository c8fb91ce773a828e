"""Launchers that are lost: the others wait for them where a restart is left, and end where not."""
import contextlib
import json
import os
import pathlib
import signal
import socket
import time
import unittest

from hostile_test import FLAGS, SHARE, Hostile, handshake, line
from launch_case import BOUND_S, free_port, marked
from nodes_test import WAIT, Nodes

# The first attempt lasts until somebody ends it; the second one says that it was there.
FIRST_WAITS = ('echo $$ > $NOTES/up$TORCHELASTIC_RESTART_COUNT.$RANK; '
               'echo rank $RANK in attempt $TORCHELASTIC_RESTART_COUNT; '
               '[ $TORCHELASTIC_RESTART_COUNT = 0 ] && sleep 300; exit 0')


class Lost(Nodes):
    def launch(self, node, script, *flags, **options):
        return self.node(node, script, *flags, **{"nnodes": 3, "nproc": 1, **options})

    def lose(self, victim, script, *flags):
        """Three launchers, of which the victim is killed when all ranks run: those that are left,
        as soon as they wait for it."""
        self.forget_notes()
        self.port = free_port()
        processes = [self.launch(node, script, *flags) for node in range(3)]
        self.wait_notes("up0", 3)
        processes[victim].kill()
        processes[victim].wait()
        left = [process for node, process in enumerate(processes) if node != victim]
        for process in left:
            self.wait_line(process.stderr, "restarting all ranks (1 of ", "s for " + (
                "it at 127.0.0.1" if victim == 0 else f"node {victim}: start"))
        return left

    def test_a_launcher_that_comes_back_continues_the_run(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                left = self.lose(victim, FIRST_WAITS, "--max-restarts=2")
                back = self.launch(victim, FIRST_WAITS, "--max-restarts=2")
                ranks = [rank for rank in range(3) if rank != victim] + [victim]
                for rank, process in zip(ranks, [*left, back]):
                    code, out, err = self.finish(process)
                    self.assertEqual(code, 0, err)
                    self.assertIn(f"rank {rank} in attempt 1", out)
                    self.assertEqual("in attempt 0" in out, process is not back)
                    if process is not back:
                        self.assertIn(f"the launcher of node {victim}", err)
                        self.assertIn("is lost", err)

    def test_it_counts_as_one_restart(self):
        script = FIRST_WAITS.replace("= 0 ]", "!= 2 ]")
        for victim in (1, 0):
            with self.subTest(victim=victim):
                left = self.lose(victim, script, "--max-restarts=1")
                back = self.launch(victim, script, "--max-restarts=1")
                self.wait_notes("up1", 3)
                back.kill()
                for code, err in self.ends(left):
                    self.assertEqual(code, 1, err)
                    self.assertEqual(err.count("restarting all ranks"), 1)

    def test_a_launcher_that_does_not_come_back_ends_the_run(self):
        for victim, message in ((1, "the launcher of node 1 on"),
                                (0, "node 0's launcher was not found at 127.0.0.1")):
            with self.subTest(victim=victim):
                left = self.lose(victim, FIRST_WAITS, "--max-restarts=2", "--startup-timeout=10")
                for code, err in self.ends(left):
                    self.assertEqual(code, 1, err)
                    report = err[err.index("restarting all ranks"):]
                    self.assertIn(message, report)
                    self.assertIn("timed out", report)
                    self.assertIn("within 10 s", report)
                self.assertEqual(marked(self.marker), [])

    def test_only_the_same_number_of_ranks_takes_its_place(self):
        left = self.lose(2, FIRST_WAITS, "--max-restarts=1")
        code, _, err = self.finish(self.launch(2, FIRST_WAITS, "--max-restarts=1", nproc=2))
        self.assertEqual(code, 2, err)
        self.wait_line(left[0].stderr, "brings 2 ranks of role default, but the launcher that it "
                                       "comes for had 1")
        for code, err in self.ends([*left, self.launch(2, FIRST_WAITS, "--max-restarts=1")]):
            self.assertEqual(code, 0, err)

    def test_only_the_same_program_takes_its_place(self):
        left = self.lose(2, FIRST_WAITS, "--max-restarts=1")
        code, _, err = self.finish(self.launch(2, "echo of another job", "--max-restarts=1"))
        self.assertEqual(code, 2, err)
        self.wait_line(left[0].stderr, "with another program, or with other arguments, than the "
                                       "launcher that it comes for")
        for code, err in self.ends([*left, self.launch(2, FIRST_WAITS, "--max-restarts=1")]):
            self.assertEqual(code, 0, err)

    def test_a_request_to_stop_while_a_lost_one_is_waited_for(self):
        for victim, asked in ((1, 0), (1, 1), (0, 0)):
            with self.subTest(victim=victim, asked=asked):
                left = self.lose(victim, FIRST_WAITS, "--max-restarts=1")
                left[asked].terminate()
                # Without node 0 nobody can pass it on.
                for process in left if victim != 0 else left[:1]:
                    code, _, err = self.finish(process)
                    self.assertEqual(code, 143, err)
                if victim == 0:
                    left[1].terminate()
                    self.assertEqual(self.finish(left[1])[0], 143)

    def test_a_request_to_stop_while_ranks_end_after_the_loss_of_node_0(self):
        # Ranks that end when they may, so that the request comes before.
        script = ("trap 'echo $$ > $NOTES/stopping.$RANK; while [ ! -e $NOTES/go ]; do "
                  "sleep 0.05; done; exit 1' TERM; echo $$ > $NOTES/up.$RANK; sleep 300 & wait")
        first, second = [self.launch(node, script, "--max-restarts=1", "--shutdown-timeout=300",
                                     nnodes=2) for node in (0, 1)]
        self.wait_notes("up", 2)
        first.kill()
        self.wait_notes("stopping", 1)
        second.terminate()
        self.wait_line(second.stderr, "SIGTERM received")
        pathlib.Path(self.notes, "go").touch()
        code, _, err = self.finish(second)
        self.assertEqual(code, 143, err)
        self.assertNotIn("restarting all ranks", err)

    def test_node_0_is_lost_again_before_an_attempt_has_begun(self):
        left = self.lose(0, FIRST_WAITS, "--max-restarts=1")
        left[1].kill()
        again = self.launch(0, FIRST_WAITS, "--max-restarts=1")
        self.wait_line(left[0].stderr, "waiting for node rank 2 at")  # said by the new node 0
        again.kill()
        back = [self.launch(node, FIRST_WAITS, "--max-restarts=1") for node in (0, 2)]
        for process in (left[0], *back):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertIn("in attempt 1", out)

    def test_a_second_loss_belongs_to_the_first(self):
        left = self.lose(2, FIRST_WAITS, "--max-restarts=1")
        left[1].kill()
        left[1].wait()
        self.wait_line(left[0].stderr, "for node 1, 2: start")
        back = [self.launch(node, FIRST_WAITS, "--max-restarts=1") for node in (1, 2)]
        for process in (left[0], *back):
            code, out, err = self.finish(process)
            self.assertEqual(code, 0, err)
            self.assertIn("in attempt 1", out)


class AtTheStart(Hostile):
    @contextlib.contextmanager
    def two_peers(self, *flags, **fields):
        """Node 0 of three, node 1, which has joined, and a connection that can join as node 2."""
        first = self.node(0, WAIT, *flags, nnodes=3)
        # Accepted in this order: when the one that came later has an answer, both are.
        with self.connect() as last, self.connect() as joined:
            joined.sendall(handshake(nnodes=3, **fields))
            self.until(joined.makefile("rb"), "say")
            yield first, joined, last

    @contextlib.contextmanager
    def all_at_once(self, process):
        """What happens inside is there as one batch when the launcher looks again."""
        supervisor = self.supervisor_of(process)
        # Once it waits again: until then what it has just looked at would come first.
        stat = pathlib.Path(f"/proc/{supervisor}/stat")
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":
            time.sleep(0.01)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            yield supervisor
            time.sleep(0.2)
        finally:
            os.kill(supervisor, signal.SIGCONT)

    def until(self, stream, kind):
        """None where the launcher has ended before it came."""
        while received := stream.readline():
            message = json.loads(received)
            if message["kind"] == kind:
                return message
        return None

    def test_a_node_that_is_lost_when_the_last_one_joins(self):
        with self.two_peers() as (first, joined, last):
            with self.all_at_once(first):
                last.sendall(handshake(nnodes=3, node=2))
                time.sleep(0.2)
                joined.shutdown(socket.SHUT_RDWR)
            message = self.until(last.makefile("rb"), "failed")
            self.assertIn("the launcher of node 1 on evil is lost", message["failure"])
            last.sendall(line("down", node=2))
            code, _, err = self.finish(first)
        self.assertEqual(code, 1, err)
        self.assertIn("the launcher of node 1 on evil is lost", err)

    def test_roles_of_peers_are_escaped(self):
        evil = "\x1b[2J\n[launch] forged"
        flags = {**FLAGS, "--max-restarts": "1"}
        share = {**SHARE, "role": evil}
        first = self.node(0, WAIT, "--max-restarts=1")
        self.join(flags=flags, share=share).close()
        self.wait_line(first.stderr, "as soon as every node is here again")
        self.answer(handshake(flags=flags, share={**share, "nproc_per_node": 3}))
        self.wait_line(first.stderr, "for had 2 of role")
        first.terminate()
        code, _, err = self.finish(first)
        self.assertEqual(code, 143, err)
        self.assertNotIn("\x1b", err)
        self.assertNotIn("\n[launch] forged", err)

    def test_who_comes_back_shows_the_token_of_its_run(self):
        flags = {**FLAGS, "--max-restarts": "1"}
        first = self.node(0, WAIT, "--max-restarts=1")
        with self.connect() as peer:
            peer.sendall(handshake(flags=flags))
            run = self.until(peer.makefile("rb"), "start")["run"]
        self.assertRegex(run, "^[0-9a-f]{16}$")
        self.wait_line(first.stderr, "as soon as every node is here again")
        self.assertIn(b"refused", self.answer(handshake(flags=flags, attempt=1, run="another")))
        self.wait_line(first.stderr, "node rank 1 on evil comes back to another run than this one")
        with self.connect() as peer:
            peer.sendall(handshake(flags=flags, attempt=1, run=run))
            self.assertEqual(self.until(peer.makefile("rb"), "start")["run"], run)
            first.terminate()
            self.until(peer.makefile("rb"), "stop")
            peer.sendall(line("down", attempt=1))
            self.assertEqual(self.finish(first)[0], 143)

    def test_a_new_node_0_continues_one_run(self):
        with self.two_peers(run="one") as (first, joined, last):
            last.sendall(handshake(nnodes=3, node=2, run="other"))
            self.wait_line(first.stderr, "node rank 2 on evil comes back to another run than")
            with self.connect() as right:
                right.sendall(handshake(nnodes=3, node=2, run="one"))
                for peer in (joined, right):
                    self.assertEqual(self.until(peer.makefile("rb"), "start")["run"], "one")

    def test_a_replacement_that_comes_before_the_loss_is_known(self):
        with self.two_peers() as (_, joined, last):
            last.sendall(handshake(nnodes=3))
            self.answer(handshake(nnodes=4))  # what came before it was looked at
            joined.shutdown(socket.SHUT_RDWR)
            self.assertIsNotNone(self.until(last.makefile("rb"), "say"))

    def test_nobody_joins_a_run_that_is_over(self):
        with self.two_peers() as (first, joined, _):
            first.terminate()
            # Node 0 waits for this one to hang up.
            self.assertEqual(self.until(joined.makefile("rb"), "end")["code"], 143)
            answer = b""
            with contextlib.suppress(ConnectionError), socket.create_connection(
                    ("127.0.0.1", self.port), timeout=BOUND_S) as late:
                late.sendall(handshake(nnodes=3, node=2))
                answer = late.makefile("rb").readline()
            self.assertEqual(answer, b"")
        self.assertEqual(self.finish(first)[0], 143)

    def test_a_request_to_stop_when_the_last_one_joins(self):
        # Ranks that do not get it would be killed after the grace, which is longer than the test.
        flags = {**FLAGS, "--shutdown-timeout": "300"}
        with self.two_peers("--shutdown-timeout=300", flags=flags) as (first, joined, last):
            with self.all_at_once(first) as supervisor:
                last.sendall(handshake(nnodes=3, node=2, flags=flags))
                time.sleep(0.2)
                os.kill(supervisor, signal.SIGTERM)
            # Where the request is looked at before the last one has joined, nothing is started.
            for node, peer in ((1, joined), (2, last)):
                if self.until(peer.makefile("rb"), "stop"):
                    peer.sendall(line("down", node=node))
            code, _, err = self.finish(first)
        self.assertEqual(code, 143, err)


if __name__ == "__main__":
    unittest.main(verbosity=2)

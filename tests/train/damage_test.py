"""Whatever happens to a checkpoint's files is found, and the one before it is used; and a full disk
costs checkpoints, not the steps after them: a run whose last one is lost ends with 1."""

import pathlib
import random
import re
import shutil
import subprocess
import unittest

from train_case import BOUND_S, CONFIG, LOCKSTEP, SOAK, TrainCase, checkpoints, command, finished

COUNT = 1000 if SOAK else 120


def damage(folder, rng):
    """Changes one thing, and says what."""
    files = sorted(p for p in folder.iterdir() if p.stat().st_size > 0)
    victim = rng.choice(files)
    kind = rng.choice(["flip", "truncate", "swap", "remove", "grow", "exchange"])
    content = bytearray(victim.read_bytes())
    if kind == "flip":
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del content[rng.randrange(len(content)):]
    elif kind == "grow":
        content += bytes([rng.randrange(256)])
    elif kind == "swap":
        i, j = rng.randrange(len(content)), rng.randrange(len(content))
        if content[i] == content[j]:
            content[i] ^= 0xFF
        else:
            content[i], content[j] = content[j], content[i]
    elif kind == "remove":
        victim.unlink()
        return f"{kind} {victim.name}"
    else:  # the contents of two files change places
        other = rng.choice([f for f in files if f != victim])
        content, theirs = other.read_bytes(), bytes(content)
        other.write_bytes(theirs)
    victim.write_bytes(content)
    return f"{kind} {victim.name}"


class Damage(TrainCase):
    def test_every_damage_is_found(self):
        output = self.place / "out"
        self.train(0, output, "--max_steps", 10)
        self.assertEqual(checkpoints(output), [5, 10])
        whole, victim = self.place / "whole", output / "checkpoint-10"
        shutil.copytree(victim, whole)
        rng = random.Random(4)
        for _ in range(COUNT):
            what = damage(victim, rng)
            done = finished([LOCKSTEP, "checkpoint", "verify", output])
            self.assertEqual(done.returncode, 1, f"{what}: {done.stdout}")
            self.assertIn(f"damaged {victim}", done.stdout, what)
            self.assertIn(f"ok      {output}/checkpoint-5", done.stdout, what)
            shutil.rmtree(victim)
            shutil.copytree(whole, victim)
        damage(victim, rng)
        done = self.train(0, output, "--resume", "auto", "--max_steps", 10)
        self.assertIn("checkpoint-10 is passed over", done.stderr)
        self.assertIn("checkpoint-5 at step 5", done.stderr)
        self.assert_same(whole, victim)

    def test_without_a_whole_one_it_says_so(self):
        output = self.place / "out"
        self.train(0, output, "--max_steps", 5)
        weights = output / "checkpoint-5" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        flags = ("--resume", "auto", "--max_steps", 5)
        said = self.train(0, output, *flags, code=2).stderr
        self.assertIn("out has no checkpoint that is whole: a new run", said)
        self.assertIn("overwrite_output_dir: true", said)
        self.train(0, output, *flags, "--overwrite_output_dir")
        self.verify(output)

    def test_a_full_disk_preserves_the_old_checkpoint_and_training_continues(self):
        place = self.place / "small"
        place.mkdir()
        self.config.write_text(CONFIG.replace("hidden: 32", "hidden: 200"))
        flags = ["--max_steps", "20", "--save_steps", "5"]
        # One checkpoint has 600 kB and finds 1 MB: two do not fit beside each other.
        script = (f"mount -t tmpfs -o size=2600k none {place} || exit 99\n"
                  f"head -c 1600000 /dev/zero >{place}/filler\n"
                  f"{subprocess.list2cmdline(command(0, self.config, place / 'out', *flags))}\n"
                  f"echo code $?; {LOCKSTEP} checkpoint verify {place}/out; ls {place}/out")
        done = self.with_mounts(script)
        self.assertIn("code 1", done.stdout, done.stderr)
        self.assertIn("trained until step 20, but the last checkpoint (step 20) could not be "
                      "written", done.stderr)
        self.assertIn(f"ok      {place}/out/checkpoint-5", done.stdout)
        self.assertNotIn("damaged", done.stdout)
        self.assertNotIn(".tmp-", done.stdout)
        self.assertRegex(done.stderr, r"checkpoint-\d+ was not saved; training continues\.")

    def test_a_disk_that_is_too_small_is_refused_before_training(self):
        place = self.place / "small"
        place.mkdir()
        script = (f"mount -t tmpfs -o size=40k none {place} || exit 99\n"
                  f"{subprocess.list2cmdline(command(0, self.config, place / 'out'))}")
        done = self.with_mounts(script)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, r"has room for .* and one checkpoint takes about")

    def test_a_folder_that_cannot_be_written_is_refused_before_training(self):
        place = self.place / "small"
        place.mkdir()
        script = (f"mount -t tmpfs -o ro none {place} || exit 99\n"
                  f"{subprocess.list2cmdline(command(2, self.config, place / 'a/out'))}")
        done = self.with_mounts(script)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(f"output_dir {place}/a/out: nothing can be written in {place} (Read-only "
                      "file system). Choose another output_dir", done.stderr)
        self.assertNotIn("keeps a second run out", done.stderr)

    def test_a_folder_that_cannot_be_made_is_refused_before_training(self):
        # root may write in /proc by its permissions, and makes no folder there all the same.
        done = self.train(1, "/proc/out", code=2)
        self.assertRegex(done.stderr, r"output_dir /proc/out( cannot be made: No such file|"
                         r": nothing can be written in /proc)")
        self.assertNotIn("has room for", done.stderr)

    def in_small_place(self, script):
        """Runs it where 1 MB is left for checkpoints of 600 kB, in a folder `small`."""
        place = self.place / "small"
        place.mkdir()
        self.config.write_text(CONFIG.replace("hidden: 32", "hidden: 200"))
        train = subprocess.list2cmdline(command(0, self.config, place / "out"))
        return self.with_mounts(f"mount -t tmpfs -o size=2600k none {place} || exit 99\n"
                                f"head -c 1600000 /dev/zero >{place}/filler\n"
                                f"train='timeout {BOUND_S / 2} {train}'\n{script}")

    def test_room_for_two_checkpoints_is_required_where_two_exist_at_once(self):
        done = self.in_small_place(
            "$train --max_steps 10 --save_total_limit 1; echo limit $?\n"
            "$train --max_steps 5 --save_total_limit 1; echo once $?\n"
            "$train --max_steps 8 --save_strategy no --resume auto; echo none $?\n")
        self.assertEqual(re.findall(r"^(?:limit|once|none) \d+$", done.stdout, re.M),
                         ["limit 2", "once 0", "none 0"], done.stderr)
        self.assertRegex(done.stderr, r"one checkpoint takes about .*; two exist side by side "
                                      r"until the older one is deleted \(save_total_limit\)\.")
        # The first one has taken the room, and a stop would save although nothing else does.
        self.assertRegex(done.stderr, r"one checkpoint takes about .*: a stop signal will not be "
                                      r"able to save\.")

    def test_a_stop_that_cannot_be_saved_fails(self):
        done = self.in_small_place(
            f"$train --num_train_epochs 100000 --save_steps 20 2>{self.place}/log & pid=$!\n"
            f"log={self.place}/log\n"
            "until grep -q 'was not saved' $log || ! kill -0 $pid; do sleep 0.1; done\n"
            "kill -TERM $pid; wait $pid; echo code $?\n")
        log = (self.place / "log").read_text()
        self.assertRegex(done.stdout, r"(?m)^code 1$", log)
        self.assertRegex(log, r"stopped by SIGTERM at step (\d+), but the last checkpoint \(step "
                              r"\1\) could not be written and is lost\. The newest whole "
                              r"checkpoint is \S+/checkpoint-20\.")
        self.assertNotIn("saved at step", log)

    def test_wrong_arguments(self):
        for args, text in ((["verify"], "verify needs a folder"),
                           (["verify", "/nowhere"], "/nowhere is not a folder"),
                           (["diff", "a"], "diff needs two folders"),
                           (["shwo"], "there is no 'shwo'. It is verify, show, diff, import or "
                                      "merge.")):
            self.assertIn(text, self.lockstep("checkpoint", *args, code=2).stderr)


if __name__ == "__main__":
    assert pathlib.Path(LOCKSTEP).exists()
    unittest.main()

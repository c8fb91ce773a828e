"""The Python package: every operation against gloo, training, failures, launchers, gloo replaced.

Runs the package from the build tree. Worlds are forks of this process, which has imported torch
once; launchers start trainer.py. 77: the extension cannot be built here.
"""

import datetime
import importlib.util
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

SOURCE = pathlib.Path(os.environ.get("LOCKSTEP_SOURCE")
                      or pathlib.Path(__file__).resolve().parents[2])
BIN = pathlib.Path(os.environ.get("LOCKSTEP_BIN") or SOURCE / "build/bin")
PACKAGE = pathlib.Path(os.environ.get("LOCKSTEP_TORCH_PACKAGE") or BIN.parent / "python")
WORLD_LIMIT_S = 600
DEATH_LIMIT_S = 20


def find_package():
    """Makes the package importable, or says why it is not there (77)."""
    if importlib.util.find_spec("torch") is None:
        print(f"SKIP 1: {sys.executable} has no torch")
        sys.exit(77)
    if not list(PACKAGE.glob("lockstep_torch/_C*.so")):
        build = SOURCE / "python/lockstep_build.py"
        check = subprocess.run([sys.executable, "-B", str(build), "--check"], capture_output=True,
                               text=True, check=False)
        if check.returncode:
            print(f"SKIP 1: {check.stderr.strip()}")
            sys.exit(77)
        sys.exit(f"{PACKAGE} has no lockstep_torch; build the target lockstep_torch_package")
    sys.path.insert(0, str(PACKAGE))
    # The engine is for CPU tensors, and where there is a GPU torch's PowerSGD hook refuses those.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = f"{PACKAGE}:{os.environ.get('PYTHONPATH', '')}"


find_package()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C import _distributed_c10d as c10d  # noqa: E402

import lockstep_torch  # noqa: E402
import operations  # noqa: E402
import orders  # noqa: E402
import training  # noqa: E402


# ---------------------------------------------------------------- worlds

class World:
    """Ranks that are forks of this process and rendezvous through a file."""

    def __init__(self, size, role, *args, environment=None):
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-python-")
        self.logs = []
        self.pids = []
        sys.stdout.flush()
        for rank in range(size):
            log = tempfile.TemporaryFile("w+", prefix="lockstep-python-")
            pid = os.fork()
            if pid == 0:
                self.be(rank, size, role, args, environment or {}, log)
            self.logs.append(log)
            self.pids.append(pid)

    def be(self, rank, size, role, args, environment, log):
        code = 1
        try:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ.update(environment)
            if "TORCH_DISTRIBUTED_DEBUG" in environment:
                dist.set_debug_level_from_env()
            role(rank, size, f"file://{self.folder.name}/store", *args)
            code = 0
        except BaseException:  # pylint: disable=broad-except
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def wait(self, limit_s=WORLD_LIMIT_S):
        """Exit codes (negative: signals), and what the ranks said."""
        end = time.monotonic() + limit_s
        codes = [None] * len(self.pids)
        while None in codes and time.monotonic() < end:
            for rank, pid in enumerate(self.pids):
                if codes[rank] is None:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        for rank, pid in enumerate(self.pids):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        texts = []
        for log in self.logs:
            log.seek(0)
            texts.append(log.read())
        self.folder.cleanup()
        return codes, texts


def run_world(size, role, *args, **options):
    codes, texts = World(size, role, *args, **options).wait()
    assert codes == [0] * size, f"{role.__name__} on {size} ranks: {codes}\n" + "\n".join(texts)
    return texts


def join(rank, size, method, **options):
    dist.init_process_group("lockstep", init_method=method, rank=rank, world_size=size, **options)


# ---------------------------------------------------------------- what ranks do

def compare(rank, size, method, train=False):
    join(rank, size, method)
    groups = operations.Groups()
    operations.run_table(groups)
    operations.run_beyond(groups)
    operations.run_subgroups(groups)
    operations.run_refusals(groups)
    if train:
        training.run_training(groups)
    print(f"compared {groups.compared}")
    dist.destroy_process_group()


def in_orders(rank, size, method):
    join(rank, size, method, timeout=datetime.timedelta(seconds=30))
    groups = operations.Groups()
    orders.run_dropped(groups)
    orders.run_lifetimes(groups)
    orders.run_orders(groups)
    dist.barrier()
    dist.destroy_process_group()


def again(rank, size, method):
    """A group that is destroyed and initialised again works with the same store."""
    store = dist.FileStore(method[len("file://"):], size)
    for _ in range(2):
        dist.init_process_group("lockstep", store=dist.PrefixStore("again", store), rank=rank,
                                world_size=size)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == size
        dist.destroy_process_group()


def leave_early(rank, size, method):
    """A rank that has sent and left does not disturb those that still talk."""
    join(rank, size, method)
    if rank == 0:
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            source = dist.recv(tensor)
            assert tensor.item() == source
    else:
        time.sleep(0.3 * (rank - 1))
        dist.send(torch.tensor([float(rank)]), 0)
    dist.destroy_process_group()


def forking(rank, size, method):
    """A forked child drops its copy of the group, and the rank's own continues."""
    join(rank, size, method)
    tensor = torch.zeros(3)
    work = dist.irecv(tensor, (rank + 1) % size)  # threads look after it, which no child has
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        operations.expect(RuntimeError, "was forked off", lambda: dist.all_reduce(torch.ones(1)))
        dist.destroy_process_group()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.barrier()
    dist.send(torch.full((3,), float(rank)), (rank - 1) % size)
    work.wait()
    assert tensor[2] == (rank + 1) % size
    dist.destroy_process_group()


def temporaries(rank, size, method):
    """Tensors that nobody in Python holds end on the engine's thread, which then needs Python."""
    join(rank, size, method)
    for _ in range(20_000):
        dist.all_reduce(torch.ones(5000), async_op=True).get_future().then(lambda future: None)
    dist.barrier()
    dist.destroy_process_group()


def detail(rank, size, method, as_gloo):
    """Under DETAIL the backend is wrapped, and its sequence numbers are compared."""
    if as_gloo:
        join_as_gloo(rank, size, init_method=method)
    else:
        join(rank, size, method)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.barrier()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(tensor).sum().backward()
    wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert "Wrapper" in type(wrapper).__name__, type(wrapper)
    assert tensor[0] == size
    dist.destroy_process_group()


def late(rank, size, method, how, limit_s):
    """Rank 1 never joins: the others get an error after the limit, which names rank 1."""
    limit = datetime.timedelta(seconds=limit_s)
    if how == "options":
        join(rank, size, method, pg_options=c10d.Backend.Options("lockstep", limit))
    else:
        join(rank, size, method, **({"timeout": limit} if how == "group" else {}))
    if how == "set":
        dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(limit)
    dist.barrier()
    print("all are here", flush=True)
    timed_out = pathlib.Path(method[len("file://"):] + ".timed_out")
    if rank == 1:
        while not timed_out.exists():
            time.sleep(0.05)
        os._exit(0)
    started = time.monotonic()
    try:
        if how == "operation":
            options = dist.AllreduceOptions()
            options.timeout = limit
            dist.group.WORLD.allreduce([torch.ones(5)], options).wait()
        elif how == "wait":
            dist.all_reduce(torch.ones(5), async_op=True).wait(limit)
        elif how == "anyone":
            dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(limit)
            dist.recv(torch.ones(5))
        elif how == "barrier":
            dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(limit)
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(5))
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("no error")
    assert time.monotonic() - started < limit_s + DEATH_LIMIT_S
    timed_out.touch()
    assert f"timed out after {1000 * limit_s:.0f} ms" in text, text
    # What programs look for; wait() with a limit of its own breaks nothing and says so.
    assert how == "wait" or (" Timed out " in text and " timeout " in text), text
    assert how in ("wait", "anyone") or "rank 1" in text, text


def dead_peer(rank, size, method, how):
    """Rank 1 is killed while rank 0 is in an operation with it."""
    join(rank, size, method)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(1000)
    started = time.monotonic()
    try:
        if how == "all_reduce":
            dist.all_reduce(tensor)
        elif how == "future":
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        elif how == "recv":
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor)
    except RuntimeError as error:
        print(f"failed after {time.monotonic() - started:.2f} s: {type(error).__name__}: {error}")
        assert "rank 1" in str(error), error
        assert time.monotonic() - started < DEATH_LIMIT_S
        if how == "all_reduce":  # and forever
            operations.expect(RuntimeError, "rank 1", lambda: dist.all_reduce(tensor))
        return
    raise AssertionError("no error")


class Elsewhere(dist.Store):
    """A store whose reader believes that this rank runs on another host."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        value = value if isinstance(value, bytes) else value.encode()
        if key.endswith("shm/info/1"):
            lines = value.split(b"\n")
            lines[1] = b"another boot"
            value = b"\n".join(lines)
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, amount):
        return self.store.add(key, amount)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, timeout=None):
        self.store.wait(keys)


def two_hosts(rank, size, method):
    store = dist.FileStore(method[len("file://"):], size)
    options = c10d._DistributedBackendOptions()
    kv = Elsewhere(store) if rank == 1 else store
    options.store = kv
    options.group_rank, options.group_size = rank, size
    options.timeout = datetime.timedelta(seconds=60)
    options.group_id = "0"
    options.global_ranks_in_group = []
    operations.expect(RuntimeError, "rank 1 runs on another host than rank 0",
                      lambda: lockstep_torch.create(options))
    operations.expect(RuntimeError, 'use backend="gloo"', lambda: lockstep_torch.create(options))


def join_as_gloo(rank, size, backend="gloo", **options):
    lockstep_torch.replace_gloo()
    dist.init_process_group(backend, rank=rank, world_size=size, **options)


def made_by_the_engine(group, device="cpu"):
    return type(group._get_backend(torch.device(device))).__module__ == "lockstep_torch._C"


def sum_of_ones(group=None):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def profiled(backend):
    """The operations of a profile, and the shapes of what they take."""
    other = 1 - dist.get_rank()
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
        if other == 1:
            dist.send(torch.ones(5), other)
            dist.recv(torch.ones(4))
        else:
            dist.recv(torch.ones(5), other)
            dist.send(torch.ones(4), other)
    found = {event.name: event.input_shapes for event in profile.events()
             if event.name.startswith(backend + ":")}
    expected = {"all_reduce": [[3]], "all_gather": [[2]], "send": [[5 if other == 1 else 4]]}
    expected.update({"recvAnySource": [[4]]} if other == 1 else {"recv": [[5]]})
    assert found == {f"{backend}:{name}": shapes for name, shapes in expected.items()}, found


def profiles(rank, size, method, backend):
    """Profiles name operations as gloo's do, after the backend that was asked for."""
    if backend == "gloo":
        lockstep_torch.replace_gloo()
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
    assert made_by_the_engine(dist.group.WORLD)
    profiled(backend)
    dist.destroy_process_group()


def replaced(rank, size, method):
    """Default groups, sub-groups and groups made again keep gloo's name, and what depends on it."""
    store = dist.FileStore(method[len("file://"):], size)
    limit = datetime.timedelta(seconds=1)
    for backend in ("gloo", None, "cpu:gloo,cuda:lockstep", "gloo"):
        join_as_gloo(rank, size, backend, store=store)
        assert made_by_the_engine(dist.group.WORLD) == (backend != "cpu:gloo,cuda:lockstep")
        assert sum_of_ones() == size
        assert backend != "gloo" or dist.get_backend() == "gloo"
        dist.destroy_process_group()
    join_as_gloo(rank, size, store=store)
    backend, asked = lockstep_torch.gloo._make(size, rank, [], "cpu:gloo,cuda:nccl", store, "mix",
                                               datetime.timedelta(seconds=60))
    assert backend is not None and asked == "cpu:lockstep,cuda:nccl", asked
    first = dist.new_group([0, 1])
    last = dist.new_group([size - 1])
    if rank < 2:
        assert dist.get_backend(first) == "gloo" and sum_of_ones(first) == 2
    if rank == size - 1:
        assert made_by_the_engine(last) and sum_of_ones(last) == 1
    for _ in range(3):
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    if rank < 2:
        text = "Ranks 2, 3 failed to pass monitoredBarrier in 1000 ms" if rank == 0 else (
            "Please check rank 0 logs")
        operations.expect(RuntimeError, text,
                          lambda: dist.monitored_barrier(timeout=limit, wait_all_ranks=True))
    no_time = dist.new_group(list(range(size)))
    if rank == 0:  # alone, and without a limit to wait for
        began = time.monotonic()
        operations.expect(RuntimeError, "Rank 0 timed out in monitoredBarrier after 0 ms",
                          lambda: dist.monitored_barrier(no_time, datetime.timedelta(0)))
        operations.expect(RuntimeError, "Ranks 1, 2, 3 failed to pass monitoredBarrier in 0 ms",
                          lambda: dist.monitored_barrier(no_time, datetime.timedelta(0), True))
        assert time.monotonic() - began < DEATH_LIMIT_S
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert model._get_ddp_logging_data()["backend_name"] == "gloo"
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=77))
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    assert options._timeout == datetime.timedelta(seconds=77)
    objects = [None] * size
    dist.all_gather_object(objects, rank)  # and a failed monitored_barrier breaks nothing
    assert objects == list(range(size))
    dist.destroy_process_group()


def replaced_beside_gpus(rank, size, method):
    """Where one rank has a GPU, CUDA tensors of all of them still go to gloo itself."""
    if rank == 1:
        torch.cuda.device_count = lambda: 1
    join_as_gloo(rank, size, init_method=method)
    assert made_by_the_engine(dist.group.WORLD) and sum_of_ones() == size
    gloo = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert isinstance(gloo, dist.ProcessGroupGloo), gloo
    tensor = torch.ones(3)
    gloo.allreduce([tensor]).wait()
    assert tensor[0] == size and dist.get_backend() == "gloo"
    dist.destroy_process_group()


def replaced_elsewhere(rank, size, method):
    """On two hosts a group stays gloo, on all ranks, and says so; one of one host does not."""
    store = dist.FileStore(method[len("file://"):], size)
    join_as_gloo(rank, size, store=Elsewhere(store) if rank == 1 else store)
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert sum_of_ones() == size
    pair = dist.new_group([0, 2])
    assert rank == 1 or (made_by_the_engine(pair) and sum_of_ones(pair) == 2)
    dist.destroy_process_group()


def replaced_on_one(rank, size, method, late):
    """A rank with gloo itself, or none at all, is named."""
    limit = datetime.timedelta(seconds=2 if late else 60)
    failed = pathlib.Path(method[len("file://"):] + ".failed")
    if rank == 0:
        text = "rank 1 " + ("has not answered in 2 s" if late else
                            "makes this group with gloo itself")
        operations.expect(RuntimeError, text,
                          lambda: join_as_gloo(rank, size, init_method=method, timeout=limit))
        failed.touch()
        return
    if not late:  # gloo would wait for rank 0: in a thread that nobody waits for
        threading.Thread(target=dist.init_process_group, daemon=True, args=("gloo",), kwargs={
            "init_method": method, "rank": rank, "world_size": size}).start()
    while not failed.exists():
        time.sleep(0.05)


def caching(_rank, _size, _method, limit):
    """Without the cache every step of this takes a page fault for each page of its tensor."""
    if limit == "0":
        assert not lockstep_torch.cache_cpu_memory(), "it was switched on"
        return
    if limit == "plenty":
        operations.expect(RuntimeError, "LOCKSTEP_CPU_CACHE_MAX_BYTES",
                          lockstep_torch.cache_cpu_memory)
        return
    weights = torch.zeros(9_000_000)  # 34 MB: above what malloc ever keeps

    def faults_in_steps(count):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            (weights + 1).mul_(2)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert lockstep_torch.cpu_cache_stats()["mapped"] == 0
    before = faults_in_steps(3)
    assert lockstep_torch.cache_cpu_memory() and lockstep_torch.cache_cpu_memory()
    faults_in_steps(2)
    after = faults_in_steps(3)
    assert after * 5 < before, (before, after)  # at least one fault for every huge page
    stats = lockstep_torch.cpu_cache_stats()
    assert stats["mapped"] >= 1 and stats["idle"] >= 36_000_000, stats
    lockstep_torch.empty_cpu_cache()
    assert lockstep_torch.cpu_cache_stats()["idle"] == 0


# ---------------------------------------------------------------- tests

def test_two_ranks():
    texts = run_world(2, compare, True)
    assert "compared" in texts[0], texts[0]


def test_three_ranks():
    run_world(3, compare)


def test_orders():
    run_world(3, in_orders)


def test_one_rank():
    def alone(rank, size, method):
        join(rank, size, method)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        assert future.wait()[0] is not None and tensor[0] == 1
        dist.barrier()
        dist.destroy_process_group()

    run_world(1, alone)


def test_again():
    run_world(2, again)


def test_leave_early():
    run_world(3, leave_early)


def test_forking():
    run_world(2, forking)


def test_temporaries():
    run_world(2, temporaries)


def test_detail():
    for as_gloo in (False, True):
        run_world(2, detail, as_gloo, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def test_late():
    ways = ("group", "options", "set", "operation", "wait", "anyone", "barrier")
    for limit_s in (1.5, 30):
        worlds = {how: World(2, late, how, limit_s) for how in ways}
        ends = {how: world.wait() for how, world in worlds.items()}
        # Some ways also limit the rendezvous; a busy machine gets a second try with more time.
        ways = [how for how, (_, texts) in ends.items()
                if not all("all are here" in text for text in texts)]
        for how, (codes, texts) in ends.items():
            assert codes[0] == 0 or (how in ways and limit_s < 30), f"{how}: {codes} {texts}"
        if not ways:
            break


def test_dead_peer():
    worlds = {how: World(2, dead_peer, how) for how in ("all_reduce", "future", "recv", "anyone")}
    for how, world in worlds.items():
        codes, texts = world.wait()
        assert codes == [0, -signal.SIGKILL], f"{how}: {codes} {texts[0]}"
        print(f"  {how}: {texts[0].strip()}")


def test_two_hosts():
    run_world(2, two_hosts)


def test_profiles():
    for backend in ("lockstep", "gloo"):
        run_world(2, profiles, backend)


def test_replaced():
    run_world(4, replaced)
    run_world(2, replaced_beside_gpus)


def test_replaced_elsewhere():
    texts = run_world(3, replaced_elsewhere)
    assert "stays gloo: rank 1 runs on another host than rank 0" in texts[0], texts[0]
    assert "stays gloo" not in texts[1] + texts[2], texts


def test_replaced_on_one():
    run_world(2, replaced_on_one, False)
    run_world(2, replaced_on_one, True)


def test_launchers():
    """The same script under torchrun and under lockstep run, at the same time."""
    torchrun = [sys.executable, "-B", "-m", "torch.distributed.run"]
    lockstep_run = [str(BIN / "lockstep"), "run"]
    script = str(pathlib.Path(__file__).with_name("trainer.py"))
    started = [subprocess.Popen([*launcher, "--standalone", "--nproc-per-node=2", *python, script],
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
               for launcher, python in ((torchrun, []), (lockstep_run, [sys.executable, "-B"]))]
    try:
        for process in started:
            text, _ = process.communicate(timeout=WORLD_LIMIT_S)
            assert process.returncode == 0, text
            assert text.count("trained") == 2, text
    finally:
        for process in started:
            process.kill()


def test_cache():
    for limit in ("", "0", "plenty"):
        run_world(1, caching, limit, environment={"LOCKSTEP_CPU_CACHE_MAX_BYTES": limit})


def main():
    import torch._dynamo  # pylint: disable=import-outside-toplevel,unused-import
    # DDP would import it in every fork, for seconds.
    names = [a for a in sys.argv[1:] if not a.startswith("-")]
    tests = {k[5:]: f for k, f in globals().items() if k.startswith("test_")}
    failed = []
    for name, test in tests.items():
        if names and name not in names:
            continue
        started = time.monotonic()
        try:
            test()
        except Exception:  # pylint: disable=broad-except
            traceback.print_exc()
            failed.append(name)
        state = "FAILED" if name in failed else "ok"
        print(f"{name}: {state} ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{len(failed)} failed: {failed}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

"""Ranks as forks of this process: importing torch and transformers takes longer than training.

    codes = forks.run([lambda: train(0), lambda: train(1)])
"""

import os
import signal
import traceback

LIMIT_S = 1200


def run(bodies):
    """Runs them at the same time, each in a fork. Returns their exit codes: 0 when a body ended."""
    children = []
    for body in bodies:
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(LIMIT_S)  # nobody waits forever, not even for a rank left behind
            try:
                body()
                status = 0
            except BaseException:  # a forked child must not return into the caller
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

"""No two files of the library need each other: a header and its source count as one.

    python3 tests/style/circles_test.py              the project
    python3 tests/style/circles_test.py --self-test  a circle is reported with its members

Headers cannot include each other in a circle, but a pair of a header and its source can, and then
none of them can be read, tested or moved alone.
"""

import os
import pathlib
import re
import sys

import tree
from tree import CPP, Violation


def unit_of(path):
    """world.h, world.cpp and world_impl.h (what World hides) are the unit world."""
    return re.sub(r"(_impl)?\.[a-z]+$", "", path)


def is_product(path):
    return (path.startswith((*tree.WINGS, "cli/", "bench/", "python/csrc/"))
            and pathlib.PurePosixPath(path).suffix in CPP
            and not path.startswith("lockstep/testing/")
            and not re.search(r"_(test|bench|peer|test_main)\.(cpp|cu)$|_for_test\.(h|cpp)$", path))


def graph_of(root):
    paths = [path for path in tree.files(root) if is_product(path)]
    units = {unit_of(path) for path in paths}
    graph = {unit: set() for unit in units}
    for path in paths:
        for _, _, target in tree.includes(tree.read(root, path)):
            if unit_of(target) in units and unit_of(target) != unit_of(path):
                graph[unit_of(path)].add(unit_of(target))
    return graph


def circles(graph):
    """Strongly connected components of more than one unit (Tarjan, without recursion)."""
    index, low, on_stack, stack, found = {}, {}, set(), [], []
    for start in sorted(graph):
        if start in index:
            continue
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            unit, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in on_stack:
                    low[unit] = min(low[unit], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[unit])
                if low[unit] == index[unit]:
                    members = []
                    while not members or members[-1] != unit:
                        members.append(stack.pop())
                        on_stack.discard(members[-1])
                    if len(members) > 1:
                        found.append(sorted(members))
    return found


def check(root):
    return [Violation(f"{members[0]}.h", 1, "circle",
                      f"{len(members)} files need each other: {', '.join(members)}")
            for members in circles(graph_of(root))]


def self_test():
    planted = {
        None: [{"lockstep/a/x.h": '#include "lockstep/a/y.h"\n', "lockstep/a/y.h": "\n",
                "lockstep/a/x.cpp": '#include "lockstep/a/x.h"\n',
                "lockstep/a/y_test.cpp": '#include "lockstep/a/x.h"\n'}],
        "circle": [
            {"lockstep/a/x.h": '#include "lockstep/a/y.h"\n', "lockstep/a/y.h": "\n",
             "lockstep/a/y.cpp": '#include "lockstep/a/x.h"\n'},
            {"lockstep/a/x.cpp": '#include "lockstep/a/y.h"\n',
             "lockstep/a/y.cpp": '#include "lockstep/b/z.h"\n',
             "lockstep/b/z.cpp": '#include "lockstep/a/x.h"\n'},
        ],
    }
    return tree.expect_planted("circles", check, planted)


def main():
    root = os.environ.get("LOCKSTEP_SOURCE") or pathlib.Path(__file__).resolve().parents[2]
    if "--self-test" in sys.argv:
        return self_test()
    return tree.report("circles", check(root), f"{len(graph_of(root))} units")


if __name__ == "__main__":
    sys.exit(main())

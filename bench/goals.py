"""Runs a benchmark and compares its figures with a table of goals (see goals.txt).

    goals.py NAME [TABLE]    ends with 1 when a goal is missed

LOCKSTEP_BIN has the programs; without it those of `./dev build`.
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("LOCKSTEP_SOURCE", str(ROOT))
os.environ.setdefault("LOCKSTEP_BIN", str(ROOT / "build" / "bin"))


def read(table, name):
    """The arguments and the goals of an entry."""
    arguments, goals = None, []
    for line in table.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            title, _, rest = line.partition(": ")
            found = title == name
            if found:
                arguments = shlex.split(os.path.expandvars(rest))
        elif found:
            goals.append(line.strip())
    if arguments is None or not goals:
        sys.exit(f"{table} has no goals of that name: {name}")
    return arguments, goals


def figure(document, place, key):
    """The figure, or None where it was not measured."""
    wanted = [pair.strip().split("=") for pair in place.split(",") if pair]
    rows = [row for row in document["rows"] if all(str(row.get(k)) == v for k, v in wanted)]
    rows = rows if wanted else [document]
    return rows[0].get(key) if len(rows) == 1 else None


def main(name, table=ROOT / "bench" / "goals.txt"):
    arguments, goals = read(pathlib.Path(table), name)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "figures.json"
        program = os.path.join(os.environ["LOCKSTEP_BIN"], "lockstep")
        done = subprocess.run([program, "bench", *arguments, "--json", path], check=False)
        if done.returncode != 0:
            return done.returncode
        document = json.loads(path.read_text())
    missed = False
    for goal in goals:
        place, _, condition = goal.rpartition("|")
        key, relation, bound = condition.split()
        value = figure(document, place.strip(), key)
        reached = value is not None and (value >= float(bound) if relation == ">=" else
                                         value <= float(bound))
        missed |= not reached
        print(f"{goal}: {value} {'reached' if reached else 'MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Runs the fuzzers: every parser for a while, what was found before first.

    python3 tests/fuzz/fuzz.py --programs build-fuzz/bin/fuzz --seconds 60        all of them
    python3 tests/fuzz/fuzz.py --programs build-fuzz/bin/fuzz --seconds 5 yaml    one

`./dev test --fuzz` builds the programs and calls this. An input that a parser does not survive is
saved in tests/fuzz/found/<parser>/ and is a case of the ordinary test from then on.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# What a whole run may take beyond the time asked for: starting, and the corpus under sanitizers.
SLACK_S = 120
MAX_BYTES = 1 << 16
SANITIZERS = {
    # A parser that asks for a gigabyte because of a few bytes of input has a defect.
    "ASAN_OPTIONS": "max_allocation_size_mb=1024:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def parsers():
    """The names in CMakeLists.txt: the one list of them."""
    text = (HERE / "CMakeLists.txt").read_text(encoding="utf-8")
    return re.findall(r"^lockstep_fuzzer\((\w+)", text, re.MULTILINE)


def folders(name, grown):
    places = [HERE / "corpus" / name, HERE / "found" / name, grown]
    return [str(place) for place in places if place and place.is_dir()]


def dictionary(name):
    path = HERE / "dictionary" / name
    return str(path) if path.is_file() else None


def own_command(name, options, found, grown):
    arguments = [options.programs / f"fuzz_{name}", "--max-bytes", MAX_BYTES, "--found", found]
    arguments += ["--runs", options.runs] if options.runs else ["--seconds", options.seconds,
                                                                "--seed", os.getpid()]
    if grown:
        arguments += ["--grow", grown]
    if dictionary(name):
        arguments += ["--dictionary", dictionary(name)]
    return arguments + folders(name, grown)


def libfuzzer_command(name, options, found, grown):
    arguments = [options.programs / f"fuzz_{name}", f"-max_len={MAX_BYTES}", "-timeout=10",
                 "-rss_limit_mb=2048", f"-artifact_prefix={found}/", "-print_final_stats=1",
                 "-verbosity=0"]
    arguments.append(f"-runs={options.runs}" if options.runs else
                     f"-max_total_time={options.seconds}")
    if dictionary(name):
        arguments.append(f"-dict={dictionary(name)}")
    return arguments + folders(name, grown)[::-1]  # new inputs go to the first


def summary(output):
    own = re.search(r"^runs .*", output, re.MULTILINE)
    if own:
        return own.group(0)
    stats = re.findall(r"stat::(number_of_executed_units|average_exec_per_sec|new_units_added):"
                       r"\s+(\d+)", output)
    return ", ".join(f"{label.replace('_', ' ')} {value}" for label, value in stats)


def fuzz(name, options):
    """True when nothing was found."""
    build = options.programs.parent.parent
    # The ordinary test leaves the sources alone.
    found = (build / "fuzz_found" if options.runs else HERE / "found") / name
    grown = None if options.runs else build / "fuzz_corpus" / name
    if grown:
        grown.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir()) if found.is_dir() else set()
    # libFuzzer does not make the folder of its findings.
    found.mkdir(parents=True, exist_ok=True)
    command = libfuzzer_command if options.engine == "libfuzzer" else own_command
    arguments = [str(argument) for argument in command(name, options, found, grown)]
    print(f"{name}: fuzzing", flush=True)
    try:
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, **SANITIZERS}, check=False,
                              timeout=options.seconds + SLACK_S)
        output, code = done.stdout.decode(errors="replace"), done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(errors="replace"), "none: it did not end"
    new = sorted(set(found.iterdir()) - before)
    if not any(found.iterdir()):
        found.rmdir()
    if code == 0:
        print(f"{name}: clean; {summary(output)}", flush=True)
        return True
    print(f"{output[-6000:]}\n{name}: FAILED (exit code {code})")
    for path in new:
        print(f"  saved: {os.path.relpath(path)}\n"
              f"  again: {os.path.relpath(arguments[0])} {os.path.relpath(path)}")
    sys.stdout.flush()
    return False


def main():
    known = parsers()
    reader = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--programs", type=pathlib.Path, required=True,
                        help="where fuzz_<parser> were built")
    reader.add_argument("--engine", choices=["own", "libfuzzer"], default="own")
    reader.add_argument("--seconds", type=float, default=60, help="for each parser (default 60)")
    reader.add_argument("--runs", type=int, default=0, help="so many runs instead, always the same")
    reader.add_argument("parser", nargs="*", help=f"default: all ({', '.join(known)})")
    options = reader.parse_args()
    options.programs = options.programs.resolve()
    if options.engine == "libfuzzer":
        options.seconds = max(1, round(options.seconds))  # 0 would be forever
    for name in options.parser:
        if name not in known:
            reader.error(f"there is no parser {name}; there are {', '.join(known)}")
    wanted = options.parser or known
    failed = [name for name in wanted if not fuzz(name, options)]
    print(f"{len(wanted) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the benchmarks share: measuring contenders in turn, ratios by round, tables, the machine.

Absolute times mean little on a shared machine. The contenders in a process are measured in turn,
round after round, in random order. Within a round the machine is equally busy for all of them, so
the result is the median of the ratios in each round.
"""

import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

INSTRUCTIONS = {  # vector instructions by flag in /proc/cpuinfo, latest first
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
READY = "ready"  # what a process prints before it measures


class Contender(NamedTuple):
    """A training loop to measure."""

    take: Callable[[int], object]  # runs this many steps and waits for the last
    multiple: int = 1  # `take` accepts multiples of this number of steps


def in_turn(contenders, rounds, turn_secs, slow_secs=float("inf")):
    """Returns the milliseconds per step of every turn, by name.

    Args:
        contenders: by name.
        rounds: number of turns of each contender.
        turn_secs: target duration of a turn, which has at least one step.
        slow_secs: a contender whose step takes longer is measured only once.
    """
    steps, found = {}, {}
    for name, (take, multiple) in contenders.items():
        take(multiple)  # traces and compiles
        took = seconds_of(take, multiple)
        if took > slow_secs:
            found[name] = [1e3 * took]
        else:
            found[name] = []
            steps[name] = max(1, round(turn_secs / took / multiple)) * multiple
    order = list(steps)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            found[name].append(1e3 * seconds_of(contenders[name].take, steps[name]))
    return found


def seconds_of(take, steps):
    """Returns the seconds per step, over `steps` steps."""
    began = time.perf_counter()
    take(steps)
    return (time.perf_counter() - began) / steps


def printed_by(flag):
    """Runs this script in a new process with one more flag; returns the JSON it prints."""
    lines = subprocess.run(command_of(flag), stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    return json.loads(lines.splitlines()[-1])


def command_of(flag):
    """Returns the command that runs this script with one more flag."""
    return [sys.executable, *sys.argv, flag]


def measured_into(file, flags, name=None, jobs=1):
    """Measures each part in a new process and stores it; returns the whole content of the file.

    A process calls `ready` before each thing that it measures, and prints it by `measured`. So
    several can trace and compile at once, on a machine with many cores, but only one measures.

    Args:
        file: JSON file of parts by title, by machine; written after each thing measured.
        flags: the flag of each part's process, by title.
        name: the machine's; by default, that of its processor.
        jobs: that many processes at once.
    """
    results = json.loads(file.read_text()) if file.exists() else {}
    parts = results.setdefault(name or machine(), {})
    titles, failed = list(flags), []
    for first in range(0, len(titles), jobs):
        group = {title: begun(flags[title]) for title in titles[first : first + jobs]}
        new = {title: {} for title in group}
        while group:
            lines = {title: line_of(process) for title, process in group.items()}
            for title, line in lines.items():
                found = asked(group[title]) if line == READY else line
                if found:
                    parts[title] = new[title] = new[title] | json.loads(found)
                    file.write_text(json.dumps(results, indent=1) + "\n")
                elif group.pop(title).wait():
                    failed.append(title)
    if failed:
        sys.exit(f"The processes of these failed: {'; '.join(failed)}")
    return results


def begun(flag):
    """Starts this script with one more flag."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command_of(flag), **pipes)  # noqa: S603  # this program


def asked(process):
    """Lets a process measure; returns what it prints, or "" if it failed."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return line_of(process)


def line_of(process):
    """Returns the next line that is meant for `measured_into`, or "" after the last."""
    return next((line.strip() for line in process.stdout if line.startswith((READY, "{"))), "")


def ready():
    """Says that this process can measure, and waits until it may."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit("The process that asks for measurements has ended.")


def measured(found):
    """Prints what was measured, by name, for `measured_into`."""
    print(json.dumps(found), flush=True)


def ratios_of(turns, one, other):
    """Returns the ratios of two contenders in each round."""
    if len(turns[one]) != len(turns[other]):  # one was slow and had a single turn
        return [statistics.median(turns[one]) / statistics.median(turns[other])]
    return [first / second for first, second in zip(turns[one], turns[other], strict=True)]


def with_interval(found):
    """Returns a median and its 95% bootstrap interval as text."""
    generator = random.Random(0)  # noqa: S311  # not for security
    drawn = [statistics.median(generator.choices(found, k=len(found))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return f"{statistics.median(found):.3f} ({low:.3f} to {high:.3f})"


def machine():
    """Returns the processor, its number of cores and its vector instructions."""
    facts = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    name = facts.get("model name", platform.processor())
    can = [kind for flag, kind in INSTRUCTIONS.items() if flag in facts.get("flags", "").split()]
    return ", ".join([name, f"{os.cpu_count()} cores", *can[:1]])


def table(rows):
    """Returns a Markdown table. The first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between(page, script, text):
    """Writes text between the markers of a script in a page."""
    begin, end = f"<!-- {script} writes this -->", f"<!-- {script} ends here -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])

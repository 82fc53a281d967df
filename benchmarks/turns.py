"""What the benchmarks share: contenders in turn, ratios round by round, tables, the machine.

Absolute times mean little on a machine that others use as well. Contenders of one process
take turns, round after round, in an order left to chance; each round has the machine's mood,
and what counts is the median of the rounds' ratios.
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

INSTRUCTIONS = {  # by the flag of a processor that has them; the latest first
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}


class Contender(NamedTuple):
    """Who takes part."""

    take: Callable[[int], object]  # takes so many steps, and waits until they are done
    least: int = 1  # steps come in multiples of it


def in_turn(contenders, rounds, turn_secs, slow_secs=float("inf")):
    """Returns milliseconds a step of every turn, by name; one turn of one that is slow.

    Args:
        contenders: by name.
        rounds: how often each has its turn.
        turn_secs: how long a turn shall be; at least one step.
        slow_secs: whose step takes longer has no turns but the one that showed it.
    """
    steps, found = {}, {}
    for name, (take, least) in contenders.items():
        take(least)  # traces and compiles, too
        took = seconds_of(take, least)
        if took > slow_secs:
            found[name] = [1e3 * took]
        else:
            found[name] = []
            steps[name] = max(1, round(turn_secs / took / least)) * least
    order = list(steps)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            found[name].append(1e3 * seconds_of(contenders[name].take, steps[name]))
    return found


def seconds_of(take, steps):
    """Returns the seconds a step takes, of so many."""
    began = time.perf_counter()
    take(steps)
    return (time.perf_counter() - began) / steps


def printed_by(flag):
    """Returns what a process of this script prints that has one flag more, a line of JSON."""
    command = [sys.executable, *sys.argv, flag]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    return json.loads(lines.splitlines()[-1])


def measured_into(file, flags):
    """Returns all that a file holds, after each flag's process has measured its part anew.

    Args:
        file: of JSON, written after every part: parts by title, by machine.
        flags: by the part's title.
    """
    results = json.loads(file.read_text()) if file.exists() else {}
    for title, flag in flags.items():
        results.setdefault(machine(), {})[title] = printed_by(flag)
        file.write_text(json.dumps(results, indent=1) + "\n")
    return results


def by_machine(results, shown):
    """Returns what is shown of each machine's parts, under its name."""
    return "\n\n".join(f"### {name}\n\n{shown(parts)}" for name, parts in results.items())


def ratios_of(turns, one, other):
    """Returns the ratios of two contenders, round by round."""
    if len(turns[one]) != len(turns[other]):  # one was too slow for more than a single turn
        return [statistics.median(turns[one]) / statistics.median(turns[other])]
    return [first / second for first, second in zip(turns[one], turns[other], strict=True)]


def with_interval(found):
    """Returns a median and its 95% interval, by bootstrap, in words."""
    generator = random.Random(0)  # noqa: S311  # nobody's secret
    drawn = [statistics.median(generator.choices(found, k=len(found))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return f"{statistics.median(found):.3f} ({low:.3f} to {high:.3f})"


def machine():
    """Returns what the figures are of: a processor, its cores, and how wide it computes."""
    facts = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    name = facts.get("model name", platform.processor())
    can = [kind for flag, kind in INSTRUCTIONS.items() if flag in facts.get("flags", "").split()]
    return ", ".join([name, f"{os.cpu_count()} cores", *can[:1]])


def table(rows):
    """Returns a table in Markdown; its first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_between(page, script, text):
    """Puts a script's text between its marks in a page."""
    begin, end = f"<!-- {script} writes this -->", f"<!-- {script} ends here -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])

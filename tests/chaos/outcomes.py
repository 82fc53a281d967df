"""The table of what became of odd inputs: tests/chaos/README.md, made of outcomes.json.

The nightly tests compare their own counts with outcomes.json, or write them with --regenerate; a
test of every run compares the table with it.
"""

import collections
import fcntl
import json
import pathlib

PLACE = pathlib.Path(__file__).parent / "outcomes.json"
TABLE = pathlib.Path(__file__).parent / "README.md"
ACCEPTED = "accepted, then run"  # a column: what the constructor accepts
RESULTS = ("clear", "documented", "obscure", "silent")
BEGIN = "<!-- The table below is written by the tests. -->\n"


def check(found, wrong, column, part=None, request=None):
    """Asserts that no case is wrong and that, of a nightly part, the counts are those on file.

    Args:
        found: pairs: the kind of value, and the result.
        wrong: a line about each case that is obscure or silent.
        column: of the table.
        part: which part of the column's cases these are; None for a small sample.
        request: pytest's, of a nightly test.
    """
    counts = {}
    for kind, result in found:
        counts.setdefault(kind, collections.Counter())[result] += 1
    print(column, part, dict(collections.Counter(result for _, result in found)))  # noqa: T201
    assert not wrong, "\n".join(wrong)
    # What the constructor accepts may all be right.
    assert column == ACCEPTED or any(result == "clear" for _, result in found)
    if part is None:
        return
    key = f"{column}/{part}"
    plain = {kind: dict(sorted(counter.items())) for kind, counter in sorted(counts.items())}
    if request.config.getoption("--regenerate"):
        store(key, plain)
    stored = json.loads(PLACE.read_text())
    assert key not in stored or stored[key] == plain  # the table says which parts it holds


def store(key, counts):
    """Writes the counts of a part, and the table. Several processes may do so at a time."""
    with PLACE.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        stored = json.loads(PLACE.read_text()) | {key: counts}
        PLACE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        TABLE.write_text(TABLE.read_text().partition(BEGIN)[0] + BEGIN + table())


def table():
    """The table as Markdown: kinds of values in rows, what they were passed to in columns."""
    cells = collections.defaultdict(collections.Counter)
    for key, kinds in json.loads(PLACE.read_text()).items():
        for kind, counts in kinds.items():
            cells[kind, key.split("/")[0]].update(counts)
    kinds = sorted({kind for kind, _ in cells})
    columns = sorted({column for _, column in cells})
    lines = ["| kind of value | " + " | ".join(columns) + " | all |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for kind in [*kinds, "all"]:
        row = [
            sum((cells[one, each] for one in (kinds if kind == "all" else [kind])), start())
            for each in columns
        ]
        lines.append(f"| {kind} | " + " | ".join(map(cell, [*row, sum(row, start())])) + " |")
    parts = collections.Counter(key.split("/")[0] for key in json.loads(PLACE.read_text()))
    held = ", ".join(f"{column} {count}" for column, count in sorted(parts.items()))
    return "\n".join(lines) + f"\n\nParts that the table holds: {held}.\n"


def start():
    """No case."""
    return collections.Counter()


def cell(counts):
    """A cell of the table."""
    return " / ".join(str(counts[result]) for result in RESULTS) if counts else ""

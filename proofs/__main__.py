"""Prints the table of claims: python -m proofs."""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from proofs.table import rows  # isort: skip  # after the environment is set


def main() -> int:
    """Asks for every line of the table; returns how many claims are not shown."""
    began, shown, open_claims = time.perf_counter(), 0, 0
    for row in rows():
        found = row.ask()
        named = f"{row.rule}({row.variant})" if row.variant else row.rule
        print(f"{named}: {row.claim}: {found.verdict} in {found.secs:.2f} s", found.example or "")  # noqa: T201
        holds = found.verdict == "proved" or found.verdict.startswith("searched")
        shown, open_claims = shown + holds, open_claims + (not holds)
    secs = time.perf_counter() - began
    print(f"{shown} claims hold, {open_claims} do not or are unknown, in {secs:.0f} s")  # noqa: T201
    return open_claims


if __name__ == "__main__":
    sys.exit(min(main(), 1))

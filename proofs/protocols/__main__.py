"""Searches every protocol, and finds each planted fault: python -m proofs.protocols."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from proofs.protocols import checkpoint, server, stop_signal, verdict  # isort: skip  # after the above
from proofs.protocols.search import CIRCLE, STUCK, search  # isort: skip

PROTOCOLS = (verdict, checkpoint, stop_signal, server)


def main() -> int:
    """Prints the table and the stories. Returns 1 if a claim is broken or a fault is not found."""
    wrong = 0
    for protocol in PROTOCOLS:
        name = protocol.__name__.rpartition(".")[2]
        claims = [*next(iter(protocol.BOUNDS.values()))().claims, STUCK, CIRCLE]
        print(f"{name}: {'; '.join(claims)}")  # noqa: T201
        for bounds, make in protocol.BOUNDS.items():
            found = search(make())
            said = f"BROKEN: {found.broken}" if found.broken else "all hold"
            print(  # noqa: T201
                f"  {bounds}: {found.states:,} states, at most {found.depth} actions, "
                f"{found.secs:.1f} s: {said}",
                *found.story,
                sep="\n      ",
            )
            wrong += bool(found.broken)
        for fault, make in protocol.FAULTS.items():
            found = search(make())
            said = f'breaks "{found.broken}"' if found.broken else "IS NOT FOUND"
            print(f"  fault: {fault}: {said}", *found.story, sep="\n      ")  # noqa: T201
            wrong += not found.broken
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Prints the table of claims: python -m proofs."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from proofs.claims import CLAIMS  # isort: skip  # after the environment is set
from proofs.dynamic import step_of  # isort: skip
from proofs.prove import answer  # isort: skip

VARIANTS = [(refill, pairs) for refill in ("growth", "finite_step") for pairs in (0, 2)]


def main() -> None:
    """Proves every claim for every variant of the rule."""
    for refill, pairs in VARIANTS:
        step = step_of(refill, pairs)
        for name, claim in CLAIMS.items():
            found = answer(claim, step)
            rule = f'hysteresis_refill="{refill}", {pairs} low_scale_intervals'
            print(f"{rule}: {name}: {found.verdict} in {found.secs:.2f} s", found.example or "")  # noqa: T201


if __name__ == "__main__":
    main()

"""docs/world.md, made from the entries."""

import collections
import pathlib

from world.check import TOLERANCES
from world.entries import ENTRIES
from world.entry import CELLS, EXAMPLES, FAULT, REFUSED, SAME, SHARES, TRAINS

PATH = pathlib.Path(__file__).parents[2] / "docs" / "world.md"
INTRODUCTION = """\
# Other people's models

{count} architectures that other people wrote, and what halfstep does with each of them. All are tiny
and have random weights; nothing is downloaded. This page is generated from the entries of `tests/world`
by `pytest tests/world --regenerate`, and each cell is what the tests expect. Ten architectures are
tried in CI, in two cells each, all cells within three nights. They need `pip install -e '.[world]'`.

Each architecture is trained for three steps of {examples} examples through the public `Trainer`, and
by a plain loop (`tf.GradientTape`, the mean of the losses, and the same optimizer) in float32 from the
same weights: on one device in float32 and in mixed_float16 with dynamic loss scaling, on two replicas
(`MirroredStrategy` on two CPU devices), and with two microbatches.

- **same**: each variable moved as in the plain loop. In float32 the difference is at most
  {float32:g} of the move; in float16 at most {float16:.3f}, which is 64 times the distance from 1 to the
  next number. Models that rounding disturbs more may differ by more: in float32 they are at
  most twice as far from a plain loop in float64 as the one in float32 is; in float16 the difference
  is at most twice that between the plain loop's own results in float16 and in float32. Moves under a
  hundredth of all variables' moves count as that hundredth.
- **same on shares**: the model mixes the examples that it sees together, as BatchNorm does, or adds a
  number of the whole batch to the loss. The plain loop computes the same shares of the batch one by one.
- **trains**: the model draws random numbers of its own, or no plain loop does the same division, so
  it was only seen to train: all weights are finite and move.
- **refused**: it cannot be divided, because its loss compares all examples of a batch or its state
  belongs to their rows. An error of one line says so before the first step.
- **fault**: the plain loop fails, too; the last column says how.

`jit_compile=False` in all of them, and Dropout is turned off. The networks of `keras.applications` take
one step only: after several, rounding alone has taken the plain loop elsewhere, too. A `tf.Module` that does not cast computes
in float32, also under mixed_float16.
"""


def page():
    """The text of the page."""
    text = INTRODUCTION.format(
        count=len(ENTRIES),
        examples=EXAMPLES,
        float32=TOLERANCES["float32"],
        float16=TOLERANCES["mixed_float16"],
    )
    outcomes = (SAME, SHARES, TRAINS, REFUSED, FAULT)
    text += "\n## Counts\n\n| | " + " | ".join(outcomes) + " |\n|---|" + "---|" * len(outcomes)
    for key, cell in CELLS.items():
        counts = collections.Counter(entry.outcome(key) for entry in ENTRIES)
        text += f"\n| {cell.title} | " + " | ".join(str(counts[each]) for each in outcomes) + " |"
    titles = [cell.title for cell in CELLS.values()]
    text += "\n\n## Architectures\n\n| architecture | from | " + " | ".join(titles) + " | |\n"
    text += "|---|---|" + "---|" * (len(titles) + 1) + "\n"
    plain, rows = collections.defaultdict(list), ""
    for entry in ENTRIES:
        cells = [entry.outcome(key) for key in CELLS]
        if {*cells} == {SAME} and not entry.because:
            plain[entry.source].append(entry.name)
        else:
            rows += f"| {' | '.join([entry.name, entry.source, *cells, entry.because])} |\n"
    text += rows + "\nThe same in all four:\n\n"
    return text + "".join(f"- {source}: {', '.join(names)}\n" for source, names in plain.items())

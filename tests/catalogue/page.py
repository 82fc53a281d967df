"""docs/catalogue.md, made from the rows."""

import collections
import pathlib

from catalogue import configurations
from catalogue.entries import GROUPS, entries
from catalogue.features import FEATURES_GROUP, features
from catalogue.rows import DRAWS, KERAS, NOT_TRAINED, OPEN, REFUSED, RIGHT, SHARES

PATH = pathlib.Path(__file__).parents[2] / "docs" / "catalogue.md"
VERDICTS = (RIGHT, REFUSED, KERAS, OPEN, NOT_TRAINED)

INTRODUCTION = """\
# The catalogue

Every public class of `keras.layers`, `keras.losses`, `keras.metrics`, `keras.optimizers`,
`keras.regularizers`, `keras.constraints` and `keras.initializers`, and what halfstep does with it. The
classes are read from Keras, so a class that is new in Keras fails the test until it has a row. This
page is generated from the rows of `tests/catalogue` by
`pytest tests/conformance/test_catalogue.py --regenerate`.

**right** means that small random models with the class were trained for one step by halfstep and by
a plain loop (`tf.GradientTape` over the whole batch and SGD, in the same dtype policy), and all
variables agreed on all replicas: in float32 to 64, and in half precision to 16 times the machine
epsilon of the variable's gradient; or, where long sums cancel, to twice the distance between the
plain loop's own results in half precision and in float32. An inf in the last example skipped the
step and left every variable's bits as they were. After a restore, the step was repeated with the
same bits.
Losses are compared with `train_on_batch`, metrics with Keras's results over the same
batches, and optimizers and schedules with three updates of Keras's own `apply`.

- **each share by itself**: the class mixes the examples that it sees together. A replica's microbatch
  is such a share, and the plain loop runs over the same shares.
- **random**: the plain loop runs over the same shares with the same keys.
- **Keras's fault**: Keras by itself gives the wrong result; the test runs a program that shows it.
- **open**: halfstep is wrong. The test expects that, and fails when it is mended.
- **not trained**: a base class, or nothing that a step could contain.

There are {all} configurations: 1 or 3 replicas x 1 or 2 microbatches x plain, XLA or element-wise XLA x
float32, mixed_float16 or mixed_bfloat16. CI tries every thirtieth class in one of them. Within seven nights all
classes are tried, and then in nine further configurations each, in which every value of an axis meets every value of
another. An optimizer sees float32 gradients in every precision, so optimizers are compared in float32 only.
All of this is on CPUs; [what was tried on a GPU](performance.md#on-an-h100) is little.
"""


def page():
    """The text of the page."""
    listed = [*entries(), *features()]
    text = INTRODUCTION.format(all=len(configurations.ALL))
    text += "\n## Counts\n\n| | classes | " + " | ".join(VERDICTS) + " |\n"
    text += "|---|" + "---|" * (len(VERDICTS) + 1) + "\n"
    groups = [group for group, _ in GROUPS.values()]
    for group in groups:
        text += count_row(f"`{group}`", [each for each in listed if each.group == group])
    text += count_row("all classes", [each for each in listed if each.group in groups])
    text += count_row(FEATURES_GROUP, [each for each in listed if each.group == FEATURES_GROUP])
    for group in [*groups, FEATURES_GROUP]:
        title = f"`{group}`" if group in groups else group
        text += f"\n## {title}\n" + of_group([each for each in listed if each.group == group])
    return text


def of_group(listed):
    """The entries of a group: those without a note by what a step is, and a table of the others."""
    alike, rows = collections.defaultdict(list), ""
    for entry in listed:
        name = entry.name if "`" in entry.name else f"`{entry.name}`"
        if found := notes(entry.row):
            rows += f"| {name} | {verdict_of(entry.row)} | {'. '.join(found)} |\n"
        else:
            alike[verdict_of(entry.row)].append(name)
    text = "".join(f"\n**{verdict}**: {', '.join(names)}.\n" for verdict, names in alike.items())
    return text + (f"\n| | a step is | |\n|---|---|---|\n{rows}" if rows else "")


def count_row(title, listed):
    """A row of the table of counts."""
    counts = collections.Counter(each.row.verdict for each in listed)
    cells = [str(len(listed)), *(str(counts[verdict]) for verdict in VERDICTS)]
    return f"| {title} | " + " | ".join(cells) + " |\n"


def verdict_of(row):
    """What a step with a class is, in words."""
    how = {SHARES: ", each share by itself", DRAWS: ", random"}
    return row.verdict + (how.get(row.compared_with, "") if row.verdict == RIGHT else "")


def check_refused(refuse):
    """Checks that what a row says is refused raises."""
    try:
        refuse()
    except (TypeError, ValueError):
        return
    raise AssertionError("the row says that it is refused")


def notes(row):
    """What a reader must know."""
    found = [row.because] if row.because else []
    if row.refuse:
        check_refused(row.refuse)
    if row.no_xla:
        found += ["XLA cannot compile it"]
    if row.xla_lacks:
        found += [
            f"XLA lacks its operation `{row.xla_lacks}`: TensorFlow's error with `jit_compile=True`"
        ]
    if row.fails_in:
        names = " and ".join(name.removeprefix("mixed_") for name in row.fails_in)
        found += [f"Keras by itself fails in {names}"]
    return found

"""What a row of the catalogue says about a class of Keras: how to build a small model with it, and
what must be true of a step on this model.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st

# What a row may say.
RIGHT = "right"  # one step equals a plain loop's
REFUSED = "refused"  # halfstep raises an error that says why, and what to do
KERAS = "Keras's fault"  # Keras by itself fails, or returns a wrong number
OPEN = "open"  # wrong in halfstep: the test is expected to fail, and fails when it is mended
NOT_TRAINED = "not trained"  # a base class, or nothing that a step could contain

# With what a step is compared.
WHOLE = "the whole batch"
SHARES = "each share by itself"  # the class couples the examples that it sees together
DRAWS = "each share, with its random keys"  # the class draws random numbers


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One input of a model: its shape without the batch, and the numbers in it."""

    shape: st.SearchStrategy[tuple[int, ...]]
    kind: str = "normal"  # a key of `models.VALUES`

    @property
    def real(self) -> bool:
        """Whether the input is made of floating-point numbers of both signs."""
        return self.kind == "normal"


@dataclasses.dataclass(frozen=True)
class Row:
    """How to build a model with a class, and what to expect of a step."""

    inputs: Sequence[Inputs] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values or searches
    kind: str = ""  # of labels and outputs, for losses and metrics: a key of `labels.KINDS`
    make: Callable[..., Any] | None = None  # arguments -> object; None calls the class
    call: Callable[..., Any] | None = None  # (object, *inputs) -> outputs
    compared_with: str = WHOLE
    verdict: str = RIGHT
    because: str = ""  # for the reader of the page
    no_xla: bool = False  # whether Keras says that XLA cannot compile the class
    xla_lacks: str = ""  # the operation of the class for which TensorFlow has no XLA kernel
    fails_in: Sequence[str] = ()  # precisions in which Keras by itself cannot run it
    refused_in: Sequence[str] = ()  # precisions in which halfstep refuses it: see `because`
    refuse: Callable[[], Any] | None = (
        None  # raises halfstep's error; of a right class, for other arguments
    )
    rounds_to: str = (
        ""  # the precision of the class's own arithmetic, if it is lower than the model's
    )
    shown_by: str = ""  # of an open row: what the failure's message contains
    in_graph: bool = False  # whether the plain loop must run in a graph: Keras fails eagerly
    program: str = ""  # what shows Keras's fault: raises an error if Keras is right

    def allows(self, configuration: Any) -> bool:
        """Whether a step can be compared in a configuration."""
        fails = {*self.fails_in, *self.refused_in}
        return configuration.precision not in fails and not (
            configuration.with_xla and (self.no_xla or self.xla_lacks)
        )


def sizes(*bounds: tuple[int, int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes whose sizes are within bounds."""
    return st.tuples(*(st.integers(low, high) for low, high in bounds))


VECTOR = Inputs(sizes((2, 5)))
SEQUENCE = Inputs(sizes((3, 5), (2, 4)))
IMAGE = Inputs(sizes((5, 7), (5, 7), (1, 3)))
VOLUME = Inputs(sizes((4, 5), (4, 5), (4, 5), (1, 2)))
FRAMES = Inputs(sizes((2, 3), (4, 5), (4, 5), (1, 2)))
PHOTO = Inputs(st.tuples(st.integers(6, 8), st.integers(6, 8), st.just(3)), "unit")
IDS = Inputs(sizes((2, 4)), "ids")
WORDS = Inputs(sizes((2, 3)), "words")
SENTENCE = Inputs(st.just(()), "words")

ACTIVATIONS = st.sampled_from([None, "relu", "tanh", "gelu", "silu", "softplus", "elu"])
BOOLS = st.booleans()

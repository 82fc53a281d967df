"""The table of claims: what is claimed of which rule, and how it is shown."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from proofs import constant, dynamic, float8, gradients, headroom, logmax, tolerant
from proofs.prove import BITS, Answer, answer
from proofs.search import searched_variance

MODELS: dict[str, Any] = {
    "DynamicLossScale": dynamic,
    "TolerantLossScale": tolerant,
    "HeadroomLossScale": headroom,
    "LogMaxLossScale": logmax,
    "constant scales": constant,
    "DelayedScaling": float8,
}


class Row(NamedTuple):
    """A line of the table."""

    rule: str
    variant: str
    claim: str
    ask: Callable[[], Answer]


def rows() -> Iterator[Row]:
    """Yields every line of the table; a step is traced when its first line is asked for."""
    for rule, model in MODELS.items():
        for variant in model.VARIANTS:
            yield from rows_of(rule, model, variant)
    yield Row("LogMaxLossScale", "None", "variance_stays", searched_variance)
    for name in gradients.CLAIMS:
        yield Row("gradients", "", name, partial(ask_of, name))


def rows_of(rule: str, model: Any, variant: Any) -> Iterator[Row]:
    """Yields the lines of one variant of a rule."""
    steps = [model.step_of(variant)]
    if model is float8:
        steps += [model.step_of(variant, margin=margin) for margin in float8.MARGINS if margin]
    for step in steps:
        text = f"{variant}, margin {step.margin}" if model is float8 else str(variant)
        for name, claim in model.claims(variant).items():
            yield Row(rule, text, name, partial(answer, claim(step), model.given(step)))
    if model is float8:
        yield Row(rule, str(variant), "rises_with", partial(answer, *float8.rises_with(steps[0])))


def ask_of(name: str) -> Answer:
    """Asks whether a claim about gradients can fail."""
    return answer(*gradients.CLAIMS[name](), BITS if name.startswith("sums_") else ())

"""A sigmoid in half precision before a cross-entropy is warned of; logits and float32 are not."""

import keras
import pytest

from trainer.base.warn_once import warn_once
from trainer.losses.half_probabilities import warn_of_half_probabilities
from trainer.losses.output_losses import OutputLosses


def sequential(activation, dtype="mixed_float16"):
    """Returns a model whose last layer has an activation and a dtype policy."""
    last = keras.layers.Dense(4, activation, dtype=dtype, name="last")
    return keras.Sequential([keras.Input([2]), last])


def functional(activation):
    """Returns a functional model of two outputs, the second of which has the activation."""
    inputs = keras.Input([2])
    first = keras.layers.Dense(1, dtype="mixed_float16", name="first")(inputs)
    hidden = keras.layers.Dense(3, "sigmoid", dtype="mixed_float16", name="hidden")(inputs)
    second = keras.layers.Dense(4, dtype="mixed_float16", name="second")(hidden)
    return keras.Model(
        inputs, [first, keras.layers.Activation(activation, dtype="float16")(second)]
    )


BOTH = OutputLosses(
    {0: keras.losses.get("mse"), 1: keras.losses.get("categorical_crossentropy")}, {0: 1.0, 1: 1.0}
)
LOGITS = keras.losses.BinaryCrossentropy(from_logits=True)
WARNED = [
    (sequential("sigmoid"), keras.losses.binary_crossentropy),
    (sequential("softmax", "mixed_bfloat16"), keras.losses.SparseCategoricalCrossentropy()),
    (functional("softmax"), BOTH),
]
QUIET = [
    (sequential("sigmoid", "float32"), keras.losses.binary_crossentropy),
    (sequential(None), keras.losses.binary_crossentropy),
    (sequential("sigmoid"), LOGITS),
    (sequential("sigmoid"), keras.losses.mean_squared_error),
    (sequential("sigmoid"), None),
    (sequential("sigmoid"), lambda y, p: y - p),
    (functional(None), BOTH),
    (keras.layers.Dense(1), keras.losses.binary_crossentropy),
]


@pytest.mark.parametrize("case", range(len(WARNED)))
def test_probabilities_in_half_precision_are_warned_of(case, caplog):
    """The warning names the layer, its precision and both ways out."""
    warn_once.cache_clear()
    model, loss_fn = WARNED[case]
    warn_of_half_probabilities(model, loss_fn)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"The layer {model.layers[-1].name!r} computes probabilities in ")
    assert text.endswith(
        " of 1 are rounded, and at 1 the loss has no gradient. Create the layer with "
        'dtype="float32", or leave out its activation and use a loss with from_logits=True.'
    )


@pytest.mark.parametrize("case", range(len(QUIET)))
def test_nothing_else_is_warned_of(case, caplog):
    """Logits, float32, other losses and models without a known last layer give no warning."""
    warn_once.cache_clear()
    warn_of_half_probabilities(*QUIET[case])
    assert not caplog.records

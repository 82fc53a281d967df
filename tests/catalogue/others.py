"""The rows of everything that Keras has around layers: losses, metrics, optimizers, schedules,
regularizers, constraints and initializers.
"""

import hypothesis.strategies as st
import keras
import tensorflow as tf
from catalogue.check_optimizer import OwnOptimizer, OwnSchedule
from catalogue.rows import NOT_TRAINED, REFUSED, Inputs, Row

import scaling
from trainer.step import plan_step

DENSE = Inputs(st.just((4,)))
SMALL = st.sampled_from([0.01, 0.1])


class Cubes(keras.regularizers.Regularizer):
    """A regularizer of one's own."""

    def __call__(self, weights):
        """The sum of the cubes' magnitudes, a tenth of it."""
        return 0.1 * keras.ops.sum(keras.ops.abs(weights) ** 3)


class Halved(keras.constraints.Constraint):
    """A constraint of one's own."""

    def __call__(self, weights):
        """The weights within a half."""
        return keras.ops.clip(weights, -0.5, 0.5)


class Rising(keras.initializers.Initializer):
    """An initializer of one's own."""

    def __call__(self, shape, dtype=None):
        """Numbers from 0 to 1."""
        return keras.ops.reshape(keras.ops.linspace(0.0, 1.0, int(tf.reduce_prod(shape))), shape)


def of_kernel(argument, replacement=None):
    """Returns a function that makes the row of a class whose objects a Dense layer takes."""

    def row(cls, **arguments):
        made = replacement or cls

        def make(**drawn):
            return keras.layers.Dense(4, **{argument: made(**drawn)})

        return Row([DENSE], arguments, make=make)

    return row


def kernel_rows(argument, classes, base, own):
    """The rows of regularizers, constraints or initializers."""
    row = of_kernel(argument)
    rows = {name: row(cls, **arguments) for name, (cls, arguments) in classes.items()}
    return rows | {base: of_kernel(argument, own)(own)}


R, C, N = keras.regularizers, keras.constraints, keras.initializers
REGULARIZERS = kernel_rows(
    "kernel_regularizer",
    {
        "L1": (R.L1, {"l1": SMALL}),
        "L2": (R.L2, {"l2": SMALL}),
        "L1L2": (R.L1L2, {"l1": SMALL, "l2": SMALL}),
        "OrthogonalRegularizer": (R.OrthogonalRegularizer, {"factor": SMALL}),
    },
    "Regularizer",
    Cubes,
)
CONSTRAINTS = kernel_rows(
    "kernel_constraint",
    {
        "MaxNorm": (C.MaxNorm, {"max_value": st.sampled_from([0.25, 0.5])}),
        "MinMaxNorm": (C.MinMaxNorm, {"min_value": 0.25, "max_value": 0.5}),
        "NonNeg": (C.NonNeg, {}),
        "UnitNorm": (C.UnitNorm, {}),
    },
    "Constraint",
    Halved,
)
SEEDED = (
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "LecunNormal",
    "LecunUniform",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
)
INITIALIZERS = kernel_rows(
    "kernel_initializer",
    {name: (getattr(N, name), {"seed": st.integers(1, 100)}) for name in SEEDED}
    | {"Constant": (N.Constant, {"value": 0.5}), "Identity": (N.Identity, {})}
    | {"Ones": (N.Ones, {}), "Zeros": (N.Zeros, {})},
    "Initializer",
    Rising,
) | {"STFT": Row([DENSE], verdict=NOT_TRAINED, because="makes the fixed kernel of STFTSpectrogram")}


def plan_with(optimizer):
    """Plans a step with an optimizer."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    plan_step(
        strategy=tf.distribute.get_strategy(),
        model=model,
        optimizer=optimizer,
        compute_loss=lambda batch, training: model(batch, training=training)[:, 0],
        rule=scaling.NoLossScale(),
    )


def several_optimizers(**_):
    """Adam for the embedding, SGD for the rest."""
    sgd, adam = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(sgd, {".*embedding.*": adam})
    )


# Optimizers: arguments beside the learning rate.
OPTIMIZERS = {
    "Adadelta": Row(),
    "Adafactor": Row(),
    "Adagrad": Row(),
    "Adam": Row(arguments={"amsgrad": st.booleans()}),
    "AdamW": Row(),
    "Adamax": Row(),
    "Ftrl": Row(),
    "Lamb": Row(),
    "Lion": Row(),
    "Muon": Row(),
    "Nadam": Row(),
    "RMSprop": Row(arguments={"centered": st.booleans(), "momentum": SMALL}),
    "SGD": Row(arguments={"momentum": SMALL, "nesterov": st.booleans()}),
    "ScheduleFreeAdamW": Row(),
    "Optimizer": Row(make=OwnOptimizer),
    "LossScaleOptimizer": Row(
        verdict=REFUSED,
        because="the step scales the loss itself",
        refuse=lambda: plan_with(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
    ),
    "MultiOptimizer": Row(
        make=several_optimizers,
        because="refused if it makes its optimizers when it is built",
        refuse=lambda: plan_with(keras.optimizers.MultiOptimizer(keras.optimizers.SGD)),
    ),
    "OptimizerMap": Row(verdict=NOT_TRAINED, because="what `MultiOptimizer` is made of"),
}
SCHEDULES = {
    "CosineDecay": Row(arguments={"initial_learning_rate": 0.1, "decay_steps": 4}),
    "CosineDecayRestarts": Row(arguments={"initial_learning_rate": 0.1, "first_decay_steps": 2}),
    "ExponentialDecay": Row(
        arguments={"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.5}
    ),
    "InverseTimeDecay": Row(
        arguments={"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.5}
    ),
    "PiecewiseConstantDecay": Row(arguments={"boundaries": [1, 2], "values": [0.1, 0.05, 0.025]}),
    "PolynomialDecay": Row(arguments={"initial_learning_rate": 0.1, "decay_steps": 4}),
    "LearningRateSchedule": Row(make=OwnSchedule),
}

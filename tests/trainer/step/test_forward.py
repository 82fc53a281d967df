"""The forward pass computes with given values and assigns nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plans import Pair, keras_model, pass_inputs_of, plan_of

from trainer import Trainer
from trainer.step.forward import forward, written_by
from trainer.step.plan import microbatch_plan

BATCH = tf.constant([[1.0, 2.0], [3.0, 5.0], [-1.0, 4.0]])


def constants_of(plan):
    """The constants of a pass of a plan."""
    return microbatch_plan(plan, plan.objectives, dense=False, fuse=False)


def run(plan, values=None):
    """A forward pass on `BATCH`."""
    inputs = pass_inputs_of(plan, BATCH)
    return forward(BATCH, values or inputs.values, inputs.keys, constants_of(plan))


def test_a_keras_model_assigns_nothing():
    """L6: after a forward pass every variable has its bits; BatchNorm's new statistics are returned."""
    model = keras_model()
    plan = plan_of(model)
    before = [variable.numpy().tobytes() for variable in model.variables]
    passed = run(plan)
    given = pass_inputs_of(plan, BATCH).values
    written = written_by(given, passed.after)
    changed = {
        plan.held_back[int(position)].path.split("/")[-1]
        for position, new in passed.after.items()
        if np.any(given[position].numpy() != new.numpy())
    }

    assert [variable.numpy().tobytes() for variable in model.variables] == before
    assert changed == {"moving_mean", "moving_variance"}
    assert passed.after.keys() == given.keys()
    assert written != {}


def test_the_given_values_are_used():
    """The losses come from the values in the inputs, not from those of the variables."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    plan = plan_of(keras.Sequential([keras.Input([2]), layer]))

    assert run(plan).losses[""].numpy().tolist() == [3.0, 8.0, 3.0]
    doubled = run(plan, {"0": tf.fill([2, 1], 2.0)})
    assert doubled.losses[""].numpy().tolist() == [6.0, 16.0, 6.0]


def test_model_losses_are_returned():
    """A regularizer's loss is returned beside the losses of the examples."""
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )
    passed = run(plan_of(keras.Sequential([keras.Input([2]), layer])))

    assert [float(loss) for loss in passed.added] == [1.0]


def test_a_module_gives_losses_alone():
    """A module has no losses of its own, and nothing of it is held back."""
    model = Pair()
    plan = plan_of(model)
    batch = tf.constant([1.0, 2.0])
    inputs = pass_inputs_of(plan, batch)
    passed = forward(batch, inputs.values, inputs.keys, constants_of(plan))

    assert passed.losses[""].numpy().tolist() == [5.0, 10.0]
    assert (passed.added, passed.after, passed.aux) == ([], {}, ())


def test_keys_decide_what_a_model_draws():
    """Dropout draws from the key that it is given: the same key gives the same mask."""
    plan = plan_of(keras_model())
    inputs = pass_inputs_of(plan, BATCH)
    constants = constants_of(plan)
    losses = [
        forward(BATCH, inputs.values, inputs.keys * key, constants).losses[""].numpy().tolist()
        for key in (5, 5, 6)
    ]

    assert losses[0] == losses[1] != losses[2]


def test_only_what_changed_is_written():
    """`written_by` returns the values that were replaced, by their position as a string."""
    old, new = tf.constant(1.0), tf.constant(2.0)

    assert written_by({"0": old, "1": old}, {"0": old, "1": new, "2": new}) == {
        "1": new,
        "2": new,
    }
    assert written_by({}, {}) == {}


class Shrinking(keras.layers.Layer):
    """Assigns the kernel of an inner layer in each pass."""

    def __init__(self, **arguments):
        """Creates the layer inside."""
        super().__init__(**arguments)
        self.inner = keras.layers.Dense(1, dtype="mixed_float16")

    def call(self, inputs):
        """Halves the kernel."""
        outputs = self.inner(inputs)
        self.inner.kernel.assign(self.inner.kernel * 0.5)
        return outputs


def shrinking(policy):
    """A model that assigns a weight in a layer with this policy."""
    return keras.Sequential([keras.Input([2]), Shrinking(dtype=policy)])


def trained(model, compute_loss=None):
    """The weights of a model after a step in float16."""

    class Own(Trainer):
        def compute_loss(self, batch, training):
            if compute_loss:
                return compute_loss(self.model, batch, training)
            return super().compute_loss(batch, training)

    trainer = Own(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        loss_fn="mse",
        precision="mixed_float16",
        check_gradients=False,
        loss_scale=1.0,
        verbose=False,
    )
    trainer.train((np.ones([4, 2], "f"), np.ones([4, 1], "f")), steps=1, global_batch=4)
    return trainer.model.get_weights()


def test_a_rounded_weight_is_refused():
    """L13: a layer that reads its weights in half precision must not assign one."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        trained(lambda: shrinking("mixed_float16"))
    assert str(error.value).startswith(
        "`model` must not assign its weights in half precision; got an assignment to "
    )


def test_a_weight_that_is_not_rounded_is_assigned():
    """What assigns it reads it in float32: a layer with that policy, or the loss itself."""
    trained(lambda: shrinking("float32"))
    third = np.float32(1 / 3)

    def perturbed(model, batch, training):
        x, y = batch
        for weight in model.trainable_variables:
            weight.assign(weight + third)
        return tf.reduce_mean((tf.cast(model(x, training=training), tf.float32) - y) ** 2, axis=1)

    def dense():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        return keras.Sequential([keras.Input([2]), layer])

    kernel, bias = trained(dense, perturbed)

    assert kernel.tolist() == [[np.float32(1.0) + third]] * 2
    assert bias.tolist() == [third]

# %% [markdown]
# # A loop of your own
#
# Three loops, each of which you own: one with `LossScaler`, one with the rule as a plain value,
# and one with the whole step, on two replicas. It takes about twenty seconds on two CPU cores.
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer.step import TrainState, attempt_step, plan_step  # isort: skip  # import first: it configures TensorFlow

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import scaling
import strategies

strategies.split_cpu(2)  # two logical devices, for the last loop
images, labels = load_digits(return_X_y=True)
images, labels = (images / 16.0).astype("float32"), labels.astype("int32")
data = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437]))
data = data.shuffle(1437, seed=0).batch(64, drop_remainder=True).repeat()


def network():
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    hidden = keras.layers.Dense(64, activation="relu")
    model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])
    keras.config.set_dtype_policy("float32")
    return model


def losses_of(model, images, labels):
    logits = tf.cast(model(images), tf.float32)  # the loss in float32
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def accuracy(model):
    correct = tf.argmax(model(images[1437:]), axis=1, output_type=tf.int32) == labels[1437:]
    return float(tf.reduce_mean(tf.cast(correct, tf.float32)))


# %% [markdown]
# ## With `LossScaler`
#
# The scale and its counters are variables of the scaler, so it works inside a `tf.function` and
# belongs in your `tf.train.Checkpoint`. Scale, differentiate, unscale, judge, clip, apply:

# %%
model, optimizer = network(), keras.optimizers.Adam(3e-3)
optimizer.build(model.trainable_variables)
scaler = scaling.LossScaler(scaling.DynamicLossScale(initial_scale=2.0**22))


@tf.function
def scaler_step(images, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(losses_of(model, images, labels))
        scaled_loss, token = scaler.scale(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = scaler.unscale(gradients, token)
    clipped, norm = tf.clip_by_global_norm(gradients, 1.0)  # after unscaling
    apply = scaler.update(scaling.all_finite([gradients, norm]))
    if apply:
        optimizer.apply(clipped, model.trainable_variables)
    return loss


scales = []
for batch in data.take(200):
    scaler_step(*batch)
    scales.append(float(scaler.loss_scale))
print(f"accuracy {accuracy(model):.1%}, {int(optimizer.iterations)} of 200 applied")
assert accuracy(model) > 0.85

# %% [markdown]
# ## With the rule as a value
#
# A rule is a frozen dataclass, and its state a tuple of tensors. `advance` is a pure function, so
# the whole step can be one, too: nothing hides in an object.

# %%
rule = scaling.DynamicLossScale(initial_scale=2.0**22)


@tf.function
def pure_step(weight, state, x, y):
    with tf.GradientTape() as tape:
        tape.watch(weight)
        half = tf.cast(x, tf.float16) * tf.cast(weight, tf.float16)
        loss = tf.reduce_mean((tf.cast(half, tf.float32) - y) ** 2)
        scaled_loss = scaling.scale_loss(loss, state)
    [gradient] = scaling.unscale_gradients([tape.gradient(scaled_loss, weight)], state)
    finite = scaling.all_finite(gradient)
    return tf.where(finite, weight - 0.1 * gradient, weight), rule.advance(state, finite)


weight, state = tf.constant(0.0), rule.initial_state()
for _ in range(50):
    weight, state = pure_step(weight, state, tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0]))
print(f"weight {float(weight):.3f} at a loss scale of {float(state.loss_scale):.0f}")
assert abs(float(weight) - 3) < 0.01

# %% [markdown]
# ## With the whole step, on two replicas
#
# Keras's `optimizer.apply` sums the gradients over replicas after they have been judged, so on
# several replicas use the step. It gives you the report of each step: the loss, the verdict, the
# cause of a skip.

# %%
strategy = strategies.create("mirrored")
with strategy.scope():
    replicated, adam, run = network(), keras.optimizers.Adam(3e-3), TrainState(rule)
    plan = plan_step(
        compute_loss=lambda batch, training: losses_of(replicated, *batch),  # noqa: ARG005
        strategy=strategy,
        model=replicated,
        optimizer=adam,
        rule=rule,
    )


@tf.function
def whole_step(batch):
    return attempt_step(batch, plan, run)


reports = [whole_step(batch) for batch in data.take(200)]
causes = [scaling.Cause(int(report.cause)).name for report in reports if not report.grads_finite]
print(f"{strategy.num_replicas_in_sync} replicas, accuracy {accuracy(replicated):.1%}")
print("skipped:", causes)
assert set(causes) <= {"BACKWARD", "REDUCTION"}
assert accuracy(replicated) > 0.85

# %%
figure, axis = plt.subplots(figsize=(7, 2.5))
axis.step(range(200), np.log2(scales), where="post", label="LossScaler")
whole = [float(report.loss_scale) for report in reports]
axis.step(range(200), np.log2(whole), "--", where="post", label="the whole step, on two replicas")
axis.set(xlabel="step", ylabel="log2 of the loss scale", xlim=(0, 40))
axis.legend()
plt.show()

# %% [markdown]
# [`examples/own_loop.py`](../../examples/own_loop.py) is the last loop as a script, and
# [`examples/own_loop_bare.py`](../../examples/own_loop_bare.py) the same loop in bare TensorFlow,
# to compare.

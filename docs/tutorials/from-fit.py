# %% [markdown]
# # From `fit` to a trainer
#
# The same small job, first with Keras's `fit`, then with a trainer: the same bits. After that,
# what the trainer says and does beyond it. It takes about half a minute on two CPU cores. All
# counterparts are in [coming from Keras `fit`](../from-keras.md).
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer import Skips, Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=[1024, 8]).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)


def network():
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(64, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input([8]), *hidden, keras.layers.Dense(1)])


def optimizer():
    return keras.optimizers.SGD(0.05, momentum=0.9)


# %% [markdown]
# ## With `fit`
#
# Under the policy `mixed_float16`, `compile` wraps the optimizer in a `LossScaleOptimizer`.
# Nothing tells you which steps it skipped.

# %%
keras.config.set_dtype_policy("mixed_float16")
with_fit = network()
keras.config.set_dtype_policy("float32")
with_fit.compile(optimizer=optimizer(), loss="mse", jit_compile=False)
fitted = with_fit.fit(data, epochs=5, verbose=0)
print(type(with_fit.optimizer).__name__, [round(loss, 4) for loss in fitted.history["loss"]])
print("updates:", int(with_fit.optimizer.iterations), "of", 5 * len(data))

# %% [markdown]
# ## With a trainer
#
# The policy is an argument. `loss_scale="keras3"` is exactly Keras's rule; without it, the rule is
# `DynamicLossScale`.

# %%
trainer = Trainer(
    model=network,
    optimizer=optimizer,
    loss_fn="mse",
    precision="mixed_float16",
    loss_scale="keras3",
    log_interval=len(data),
    jit_compile=False,
)
summary = trainer.train(data, epochs=5)

# %% [markdown]
# Every skipped step is counted, with its cause. The weights have the same bits:

# %%
for ours, theirs in zip(trainer.model.get_weights(), with_fit.get_weights(), strict=True):
    assert np.array_equal(ours, theirs)
assert summary.totals.applied == int(with_fit.optimizer.iterations)
print(summary.totals)

# %% [markdown]
# ## What one inf does
#
# One label of the last batch is now inf. The loss of that batch is inf, and its gradients are not
# finite: both skip the step. But the loss that `fit` reports is inf for that epoch.

# %%
damaged = y.copy()
damaged[-1] = np.inf
fitted = with_fit.fit(x, damaged, batch_size=64, epochs=2, shuffle=False, verbose=0)
print("fit:", fitted.history["loss"])
other = Trainer(
    model=network,
    optimizer=optimizer,
    loss_fn="mse",
    precision="mixed_float16",
    verbose=False,
    log_interval=16,
    jit_compile=False,
)
pipeline = tf.data.Dataset.from_tensor_slices((x, damaged)).batch(64)
summary = other.train(pipeline, epochs=2)
print("trainer:", summary.history["loss"], summary.totals)
assert np.isfinite(summary.history["loss"]).all()
assert not np.isfinite(fitted.history["loss"]).any()

# %% [markdown]
# ## No batch lost
#
# With `on_overflow="retry"`, a batch that overflows is attempted again at a smaller scale, so that
# a scale that begins too high costs no update.

# %%
curves = {}
for name in ("skip", "retry"):
    run = Trainer(
        model=network,
        optimizer=optimizer,
        loss_fn="mse",
        precision="mixed_float16",
        loss_scale="dynamic:initial_scale=2^24",
        skips=Skips(on_overflow=name),
        verbose=False,
        log_interval=4,
        jit_compile=False,
    )
    summary = run.train(data, steps=80)
    curves[name] = summary.history
    print(f"{name:5}", summary.totals, "retries:", summary.totals.retries)
assert summary.totals.skipped == 0

figure, axis = plt.subplots(figsize=(7, 2.5))
for name, history in curves.items():
    axis.plot(history["step"], history["loss"], label=f'on_overflow="{name}"')
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.legend()
plt.show()

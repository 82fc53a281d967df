# %% [markdown]
# # A first run
#
# This tutorial trains a small network on scans of handwritten digits in float16, tries everything
# once before the run, watches it, and looks at what it has learned. It takes about half a minute
# on two CPU cores. You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
train_data = images[:1437], labels[:1437]
test_data = images[1437:], labels[1437:]
print(images.shape, labels[:10])

# %% [markdown]
# ## The trainer
#
# A trainer needs three things: how to make the model, how to make the optimizer, and the loss. The
# model is built under the dtype policy of `precision`, so each layer computes in float16 and keeps
# float32 variables. Begin with a loss scale that is far too high, to see what happens then.


# %%
def network():
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


digits = Trainer(
    model=network,
    optimizer=lambda: keras.optimizers.Adam(1e-3),
    loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    precision="mixed_float16",
    loss_scale="dynamic:initial_scale=2^24",
    log_interval=20,
    seed=0,
)

# %% [markdown]
# ## Before the run
#
# `dry_run` tries everything that the run will do, and then restores every bit: two steps, an
# evaluation, a checkpoint that is written and read again, and an estimate of memory.

# %%
found = digits.dry_run(train_data, global_batch=64, eval_data=test_data)
print(found)
assert found.ok

# %% [markdown]
# Its training step was **skipped**. At a loss scale of 2^24 the gradients are larger than 65504,
# the largest number of float16. This is nothing to worry about: each skipped step halves the
# scale, until the gradients fit.
#
# ## The run
#
# `steps` is the step to reach, and a batch has 64 examples. On a terminal you see a progress bar;
# here are the lines of a log file.

# %%
summary = digits.train(
    train_data, steps=400, global_batch=64, eval_data=test_data, eval_interval=40
)
assert summary.totals.applied + summary.totals.skipped == 400

# %% [markdown]
# `summary.history` holds the numbers of all log lines, as NumPy arrays.

# %%
history = summary.history
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(history["step"], history["loss"], label="training")
left.plot(history["val_step"], history["val_loss"], label="held out")
left.set(xlabel="step", ylabel="loss", yscale="log")
left.legend()
right.step(history["step"], np.log2(history["loss_scale"]), where="post")
right.set(xlabel="step", ylabel="log2 of the loss scale")
plt.show()

# %% [markdown]
# ## What it has learned
#
# `evaluate` and `predict` compute in float32, with the same weights.

# %%
results = digits.evaluate(test_data, global_batch=64)
print(results)
assert results["accuracy"] > 0.9

predicted = digits.predict(test_data, global_batch=64).argmax(axis=-1)
wrong = np.flatnonzero(predicted != test_data[1])[:8]
figure, axes = plt.subplots(1, 8, figsize=(9, 1.6))
for axis in axes:
    axis.axis("off")
for axis, index in zip(axes, wrong, strict=False):
    axis.imshow(test_data[0][index, :, :, 0], cmap="gray_r")
    axis.set_title(f"{predicted[index]}, not {test_data[1][index]}", fontsize=9)
plt.show()

# %% [markdown]
# Next: [reading a skipped step](skipped-step.py), or [the tour](../tour.md), which shows how to
# stop and resume a run, how to use several replicas, and how to export a model.

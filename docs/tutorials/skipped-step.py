# %% [markdown]
# # Reading a skipped step
#
# A step that meets an inf or a NaN is skipped: no weight changes. But why was it skipped, and does
# it matter? This tutorial provokes three kinds of skipped steps, reads what the run says about
# each of them, and finds the layer where an inf was born. It takes about half a minute on two CPU
# cores.
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer import Skips, Trainer  # isort: skip  # import first: it configures TensorFlow

import json
import pathlib
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np

FIELDS = ["step", "cause", "variable", "inf_count", "nan_count", "loss_scale"]
runs = pathlib.Path(tempfile.mkdtemp())
x = np.random.default_rng(0).uniform(-1, 1, [512, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)


def network():
    hidden = keras.layers.Dense(32, activation="relu", name="hidden")
    return keras.Sequential(
        [keras.Input([4]), hidden, keras.layers.Dense(1, name="out")], name="net"
    )


def trainer(name, **arguments):
    return Trainer(
        **{
            "model": network,
            "optimizer": lambda: keras.optimizers.Adam(1e-2),
            "loss_fn": "mse",
            "precision": "mixed_float16",
            "model_dir": runs / name,
            "log_interval": 5,
            "seed": 0,
            "jit_compile": False,  # starts sooner
        }
        | arguments
    )


def skips(name):
    """Returns the lines of a run's metrics.jsonl that describe skipped steps."""
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["split"] == "skip"]


# %% [markdown]
# ## The scale was too high: `backward`
#
# This run begins at 2^24.

# %%
summary = trainer("high", loss_scale="dynamic:initial_scale=2^24").train(
    (x, y), steps=30, global_batch=32
)
for line in skips("high"):
    print({name: line[name] for name in FIELDS})
assert {line["cause"] for line in skips("high")} == {"backward"}

# %% [markdown]
# The loss was finite, and its gradients were not: the cause is `backward`. Multiplied by so large
# a scale, the gradient of a variable went beyond 65504. Each of these steps halved the scale,
# until the gradients fitted. **Nothing needs to be done.** To skip fewer steps next time, begin at
# the scale where this run ended.

# %%
history = summary.history
steps = [line["step"] for line in skips("high")]
figure, axis = plt.subplots(figsize=(7, 2.5))
axis.step(
    history["step"], np.log2(history["loss_scale"]), where="post", label="log2 of the loss scale"
)
axis.plot(steps, [np.log2(line["loss_scale"]) for line in skips("high")], "rx", label="skipped")
axis.set(xlabel="step")
axis.legend()
plt.show()

# %% [markdown]
# ## The data are wrong: `forward`
#
# Now one example holds a NaN. No scale can help, so the scale stays where it is, and the batch is
# lost.

# %%
damaged = x.copy()
damaged[100] = np.nan
summary = trainer("data").train((damaged, y), steps=32, global_batch=32)
for line in skips("data"):
    print({name: line[name] for name in FIELDS if name in line})
assert {line["cause"] for line in skips("data")} == {"forward"}
assert summary.loss_scale == 2.0**15

# %% [markdown]
# The NaN comes back in each epoch. With `on_nonfinite_loss="raise"` the run would have ended at
# the first such step; with `check_data=True`, before it.
#
# ## The model overflows: which layer?
#
# An activation beyond 65504 is inf in float16, whatever the loss scale is. Here the outputs of a
# layer are multiplied by 60,000. With `max_records`, the run keeps the batches of skipped
# steps.


# %%
def too_large():
    hidden = keras.layers.Dense(32, kernel_initializer="ones", name="hidden")
    huge = keras.layers.Rescaling(6e4, name="huge")
    return keras.Sequential(
        [keras.Input([4]), hidden, huge, keras.layers.Dense(1, name="out")], name="net"
    )


overflowing = trainer("model", model=too_large, skips=Skips(max_records=2))
overflowing.train((x, y), steps=8, global_batch=32)
records = sorted((runs / "model" / "overflows").iterdir())
print([record.name for record in records])

# %% [markdown]
# A replay takes such a step again, from its record, and names the first layer whose output is not
# finite. It puts the recorded weights into the model, so it gets a trainer of its own. (The cause
# of these skips is `forward`, too, since the loss is not finite. The cause `model` means gradients
# that are not finite even at the smallest scale.)

# %%
replay = trainer("replayed", model=too_large).replay(records[0])
print(replay)
assert "huge" in str(replay)

# %% [markdown]
# `huge` is the layer to mend: `keras.layers.Rescaling(6e4, name="huge", dtype="float32")` computes
# this one layer in float32. In a script with flags, `--mode=replay --overflow=RECORD` does the
# same.
#
# Next: [hooks](../hooks.md#when-a-step-cannot-be-applied) lists what the trainer can do when steps
# are skipped, and [troubleshooting](../troubleshooting.md) goes through the causes by symptom.

# %% [markdown]
# # float16 to the end
#
# From the first question, whether a model can be trained in float16 at all, to a file that
# computes in float16: measure what float16 loses, choose the rule of the loss scale from a
# recorded run, train, and export. It takes about a minute on two CPU cores.
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer import Monitoring, Trainer  # isort: skip  # import first: it configures TensorFlow

import pathlib
import subprocess
import sys
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import scaling

runs = pathlib.Path(tempfile.mkdtemp())
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train_data, test_data = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def network():
    hidden = [keras.layers.Dense(64, activation="tanh") for _ in range(4)]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10)])


def digits(**arguments):
    return Trainer(
        **{
            "model": network,
            "optimizer": lambda: keras.optimizers.Adam(1e-3),
            "loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
            "precision": "mixed_float16",
            "verbose": False,
            "seed": 0,
            "jit_compile": False,
        }
        | arguments
    )


# %% [markdown]
# ## What float16 would lose
#
# `gradient_stats` counts the binary exponents of gradients, computed in float32 here. From
# 2^-25 down a gradient becomes 0 in float16.

# %%
keras.utils.set_random_seed(0)
model = network()
with tf.GradientTape() as tape:
    logits = model(images[:256])
    loss = tf.reduce_mean(
        keras.losses.sparse_categorical_crossentropy(labels[:256], logits, from_logits=True)
    )
gradients = tape.gradient(loss, model.trainable_variables)
stats = scaling.gradient_stats(gradients, scaling.NoLossScale().initial_state())
for exponent in (0, 5, 10, 15):
    lost = float(tf.reduce_max(stats.flushed(factor=2.0**exponent)))
    print(f"loss scale 2^{exponent:<2}: at most {lost:.2%} of a variable's gradients become 0")
print(scaling.recommend(stats))

# %% [markdown]
# ## A recorded run
#
# With `record_gradients=True`, a run writes the same counts for its own gradients, at every step.

# %%
recorded = digits(
    model_dir=runs / "recorded", monitoring=Monitoring(record_gradients=True), log_interval=20
)
summary = recorded.train(train_data, steps=200, global_batch=64)
print(summary.totals)

# %% [markdown]
# From these, the simulator tells what any rule would have done: how many steps it would have
# skipped, and what would have been lost to underflow.

# %%
played = subprocess.run(
    [
        sys.executable,
        "-m",
        "scaling.simulate",
        str(runs / "recorded" / "metrics.jsonl"),
        "--rules=dynamic,dynamic:initial_scale=2^24,headroom,pytorch",
    ],
    capture_output=True,
    text=True,
    check=True,
)
print(played.stdout)
picture = next((runs / "recorded").glob("*.png"))
plt.figure(figsize=(9, 5))
plt.axis("off")
plt.imshow(plt.imread(picture))
plt.show()

# %% [markdown]
# ## The run
#
# In float32, and in float16 with the rule that follows the largest gradient.

# %%
curves = {}
for name, arguments in {
    "float32": {"precision": "float32"},
    "float16": {"loss_scale": "headroom"},
}.items():
    trainer = digits(log_interval=20, **arguments)
    summary = trainer.train(train_data, 400, global_batch=64, eval_data=test_data, eval_interval=40)
    curves[name] = summary.history
    print(name, trainer.evaluate(test_data, global_batch=64), summary.totals)
    assert summary.history["val_accuracy"][-1] > 0.85

figure, axis = plt.subplots(figsize=(7, 2.5))
for name, history in curves.items():
    axis.plot(history["val_step"], history["val_loss"], label=name)
axis.set(xlabel="step", ylabel="held-out loss", yscale="log")
axis.legend()
plt.show()

# %% [markdown]
# ## A file that computes in float16
#
# `evaluate` computes in float32; `precision="train"` computes as in training. If both results
# agree, the model can be used in float16. `export` writes it, reads it again, and compares its
# predictions.

# %%
in_float32 = trainer.evaluate(test_data, global_batch=64)
in_float16 = trainer.evaluate(test_data, global_batch=64, precision="train")
print(in_float32, in_float16)
assert abs(in_float32["accuracy"] - in_float16["accuracy"]) < 0.01

difference = trainer.export(runs / "half.keras", precision="float16", compare_on=test_data[0])
exported = keras.models.load_model(runs / "half.keras")
print(
    "largest difference after loading:", difference, "computes in", exported.layers[0].compute_dtype
)
agreement = np.mean(
    np.argmax(exported(images[1437:]), axis=1)
    == trainer.predict(test_data, global_batch=64).argmax(axis=1)
)
print(f"{agreement:.1%} of the answers are those of float32")
assert agreement > 0.98

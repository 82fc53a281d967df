# %% [markdown]
# # From Orbit
#
# Orbit's `Controller` runs an outer loop in Python around an inner loop in a graph. A trainer has
# the same two loops. This tutorial writes a job the way Orbit's users know it: steps per loop,
# actions, an evaluation every few steps. Orbit needs Keras 2, so it cannot run beside it here. All
# counterparts are in [coming from Orbit](../from-orbit.md). It takes about twenty seconds on two
# CPU cores.
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
from trainer import Action, Checkpoints, Trainer  # isort: skip  # import first: it configures TensorFlow

import pathlib
import tempfile

import keras
import matplotlib.pyplot as plt
import tensorflow as tf
from sklearn.datasets import load_digits

import strategies

strategies.split_cpu(2)  # two logical devices, for two replicas
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")

# %% [markdown]
# ## The trainer
#
# In Orbit, `train_step` runs the strategy, the tape, the loss scaling and `apply_gradients`. Here
# you write `compute_loss`, one loss per example, and the rest is the trainer's. `build_metrics`
# and `update_metrics` take the place of `train_loop_begin` and `train_loop_end`.


# %%
class Digits(Trainer):
    def build_model(self):
        hidden = keras.layers.Dense(64, activation="relu")
        return keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])

    def build_optimizer(self):
        return keras.optimizers.Adam(3e-3)

    def compute_loss(self, batch, training):
        images, labels = batch
        logits = tf.cast(self.model(images, training=training), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return losses, {"logits": logits}

    def build_metrics(self):
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def update_metrics(self, batch, aux):
        self.metrics["accuracy"].update_state(batch[1], aux["logits"])


# %% [markdown]
# ## The data
#
# A function of a `tf.distribute.InputContext` makes batches for one replica, as those that are
# passed to `distribute_datasets_from_function` do. The trainer joins them to global batches.


# %%
def make_data(context):
    size = context.get_per_replica_batch_size(64)
    data = tf.data.Dataset.from_tensor_slices((images[:1437], labels[:1437].astype("int32")))
    return data.shuffle(1437, seed=0).batch(size, drop_remainder=True).repeat()


held_out = tf.data.Dataset.from_tensor_slices((images[1437:], labels[1437:].astype("int32"))).batch(
    64
)

# %% [markdown]
# ## The controller
#
# `steps_per_loop`, `train_actions`, `eval_interval`, and a target step. Actions are called exactly
# where they are due: an inner loop ends early for them.

# %%
seen = []
model_dir = pathlib.Path(tempfile.mkdtemp()) / "digits"
arguments = {
    "model_dir": model_dir,
    "strategy": "mirrored",
    "precision": "mixed_float16",
    "steps_per_loop": 30,
    "log_interval": 40,
    "checkpoints": Checkpoints(interval=80),
    "jit_compile": False,
    "seed": 0,
}
actions = [Action(lambda trainer: seen.append(trainer.totals.attempted), every_steps=50)]
trainer = Digits(**arguments, callbacks=actions)
summary = trainer.train(make_data, steps=160, eval_data=held_out, eval_interval=40)
print("actions at", seen)
assert seen == [50, 100, 150]
assert trainer.strategy.num_replicas_in_sync == 2

# %%
history = summary.history
figure, axis = plt.subplots(figsize=(7, 2.5))
axis.plot(history["step"], history["accuracy"], "o-", label="training")
axis.plot(history["val_step"], history["val_accuracy"], "o-", label="held out")
axis.set(xlabel="step", ylabel="accuracy")
axis.legend()
plt.show()

# %% [markdown]
# ## Resuming
#
# A `CheckpointManager` is not needed, and `steps` means what it means in
# `controller.train(steps)`: the step to reach. The same command, with a larger target, goes on
# where the first run ended, with the same bits as a run that was never interrupted.

# %%
again = Digits(**arguments)
summary = again.train(make_data, steps=200)
print(summary.steps_run, "more steps, to step", summary.step)
assert summary.steps_run == 40

# %% [markdown]
# # Several machines
#
# A job of two workers, on this machine: two processes that find each other over the network and
# take every step together. We stop it in the middle with a signal, as a cluster's scheduler does,
# start the same command again, and compare the result with that of a job that was never stopped.
# It takes one to two minutes on two CPU cores.
#
# On real machines, nothing changes but how the processes are started: [more than one
# device](../devices.md#several-workers).
# You need `pip install -e '.[examples,plot]'` from a clone.

# %%
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import matplotlib.pyplot as plt

runs = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## The script
#
# It is an ordinary script with flags; nothing in it speaks of workers. Every worker runs it.

# %%
script = runs / "digits.py"
script.write_text("""
from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import keras
from absl import app
from sklearn.datasets import load_digits

from trainer.flags import define_flags, make_trainer, run_mode


class Digits(Trainer):
    def build_model(self):
        hidden = [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2)]
        return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10)])

    def build_optimizer(self):
        return keras.optimizers.Adam(3e-3)

    def compute_loss(self, batch, training):
        images, labels = batch
        logits = keras.ops.cast(self.model(images, training=training), "float32")
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def main(_):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    run_mode(make_trainer(Digits), (images[:1437], labels[:1437]), (images[1437:], labels[1437:]))


define_flags(strategy="multi_worker_mirrored", precision="mixed_float16", steps=400)
app.run(main)
""")


def command(model_dir):
    return [
        sys.executable,
        "-m",
        "strategies.launch",
        "--workers=2",
        str(script),
        f"--model_dir={model_dir}",
        "--loss_scale=dynamic:initial_scale=2^24",
        "--checkpoints.interval=50",
        "--log_interval=50",
        "--eval_interval=200",
        "--steps_per_loop=10",
    ]


# %% [markdown]
# ## A job that is not stopped
#
# `strategies.launch` starts the two workers with a `TF_CONFIG` each. The chief, worker 0, prints
# and writes.

# %%
whole = subprocess.run(
    command(runs / "whole"), capture_output=True, text=True, check=True, timeout=500
)
print("\n".join(line for line in whole.stdout.splitlines() if "step " in line))

# %% [markdown]
# ## A job that is stopped
#
# The same job, and a SIGTERM to the launcher once the first checkpoint is there. Both workers stop
# after the same step, the chief saves, and the job ends with status 75, which tells a scheduler to
# start it again.

# %%
stopped = subprocess.Popen(
    command(runs / "stopped"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
)
deadline = time.monotonic() + 300
while not (runs / "stopped" / "ckpt-50").exists() and stopped.poll() is None:
    assert time.monotonic() < deadline
    time.sleep(0.05)
stopped.send_signal(signal.SIGTERM)
stopped.communicate(timeout=300)
print("status", stopped.returncode, sorted(path.name for path in (runs / "stopped").glob("ckpt-*")))
assert stopped.returncode == 75

# %% [markdown]
# The same command again goes on from there.

# %%
resumed = subprocess.run(
    command(runs / "stopped"), capture_output=True, text=True, check=True, timeout=500
)
print("\n".join(line for line in resumed.stdout.splitlines() if "step " in line))

# %% [markdown]
# ## The same numbers
#
# Every number of the two runs is the same, to the last bit, but for the times: the losses, the
# loss scale, the skipped steps, and the result on the held-out scans.


# %%
def lines_of(name):
    text = (runs / name / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    kept = ("step", "split", "loss", "loss_scale", "skipped", "cause")
    return [
        {key: line[key] for key in kept if key in line}
        for line in lines
        if line["split"] in {"train", "validation", "skip"}
    ]


assert lines_of("whole") == lines_of("stopped")
print(len(lines_of("whole")), "lines are equal")

figure, axis = plt.subplots(figsize=(7, 2.5))
for name, style in {"whole": "-", "stopped": "o"}.items():
    train = [line for line in lines_of(name) if line["split"] == "train"]
    axis.plot([line["step"] for line in train], [line["loss"] for line in train], style, label=name)
axis.set(xlabel="step", ylabel="loss", yscale="log")
axis.legend()
plt.show()

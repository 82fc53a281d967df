"""Nothing that is read from `model_dir` runs code, as an audit hook confirms."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = '''
import pathlib, pickle, sys, traceback

import keras
import numpy as np
import tensorflow as tf

import scaling
from trainer import Checkpoints, Skips, Trainer, Updates

seen = []

def hook(event, arguments):
    """Records events that build objects from bytes, except Python's own imports of modules."""
    if event in ("pickle.find_class", "marshal.loads", "marshal.load"):
        files = [frame.filename for frame in traceback.extract_stack()]
        if not any("importlib" in name for name in files):
            seen.append((event, files[-2]))

sys.addaudithook(hook)
here = pathlib.Path(sys.argv[1])
x = np.arange(40, dtype=np.float32).reshape(20, 2) / 40
y = x.sum(axis=1, keepdims=True)
sound = x.copy(), y
x[5] = 1e30  # overflows in float16
shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=1).batch(4)

def layers():
    hidden = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.25)]
    return keras.Sequential([keras.Input([2]), *hidden, keras.layers.Dense(1)])

def make(folder, init_from=None):
    """Returns a trainer with every kind of variable that a checkpoint holds."""
    return Trainer(
        model=layers,
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.5),
        loss_fn="mse",
        metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
        model_dir=here / folder,
        precision="mixed_float16",
        loss_scale=scaling.DynamicLossScale(growth_interval=3),
        updates=Updates(ema_momentum=0.75),
        jit_compile=False,
        verbose=False,
        skips=Skips(max_records=1),
        checkpoints=Checkpoints(keep_best=1, init_from=init_from),
    )

def train(trainer, steps):
    return trainer.train(shuffled, steps=steps, eval_data=sound).steps_run

train(make("run"), 3)
print("before", seen)
again = make("run")
print("resumed for", train(again, 6))
[kept] = (here / "run" / "overflows").iterdir()
print("replayed:", again.replay(kept).recorded is not None)
for name in ("run", "run/ckpt-3", "run/best"):
    path = here / name
    path = next(path.glob("step-*/model.keras")) if name.endswith("best") else path
    make("new", init_from=path).evaluate(sound, global_batch=4)
print("after", seen)
np.save(here / "objects.npy", np.array([pathlib.Path()], object), allow_pickle=True)
np.load(here / "objects.npy", allow_pickle=True)
print("the hook sees", seen[0][0])
'''


@pytest.mark.slow
def test_nothing_in_model_dir_runs_code(tmp_path):
    """Resuming a run (with its data position), replaying an overflow and starting new runs from its
    weights read no pickle and no compiled code. The hook does see a pickle that is loaded on
    purpose.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "before []",
        "resumed for 3",
        "replayed: True",
        "after []",
        "the hook sees pickle.find_class",
    ]

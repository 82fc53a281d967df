"""Lowers a step of a benchmark's model: python lower.py OUT MODEL DTYPE REPLICAS FAULT.

It writes `OUT/step.hlo`, and `OUT/sizes.json` with the number of the model's trained weights and of
its other floats. With one replica that is the whole step, as `jit_compile="step"` has it compiled;
with several, the program of one replica, as it is traced for a TPU: MirroredStrategy has no such
program, because TensorFlow itself, and not XLA, sums its replicas' gradients.

FAULT is "none", or something that the check must find: see `FAULTS`.
"""

import json
import math
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import fake_tpu
import keras
import numpy as np
import tensorflow as tf
from lowered_step import lower_function, lower_replica, started
from models import POLICIES, loss_of, work_of
from tensorflow.compiler.tf2xla.python.xla import optimization_barrier

import scaling
import strategies
from trainer import Trainer


class Checked(Trainer):
    """A trainer of a benchmark's model with Adam, as `step_time.py` measures it."""

    def __init__(self, work, fault, **settings):
        """Stores the model and the fault."""
        super().__init__(
            model=work.build,
            optimizer=lambda: keras.optimizers.Adam(1e-4),
            loss_fn=loss_of,
            verbose=False,
            **settings,
        )
        self.fault = fault

    def compute_loss(self, batch, training):
        """The losses, and what the fault adds."""
        losses, outputs = super().compute_loss(batch, training)
        add = FAULTS[self.fault]
        return add(losses) if add else losses, outputs


def compute_in_float32(model):
    """Lets the model's first layer with a product compute in float32."""
    layer = next(each for each in model.layers if hasattr(each, "kernel"))
    layer.dtype_policy = keras.DTypePolicy("float32")


def asked_of_host(losses):
    """Lets the host compute a factor of the losses."""
    factor = tf.numpy_function(np.ones_like, [losses[:1]], tf.float32)
    return losses * tf.reshape(factor, [1])


def summed_again(losses):
    """Sums the losses over the replicas before the step does."""
    mean = strategies.sum_gradients(tf.stop_gradient(tf.reduce_mean(losses)))
    return losses + 1e-9 * mean


def unscale_apart(gradients, state):
    """Unscales the gradients in a pass of its own, which XLA may not join with its neighbours."""
    return optimization_barrier(*UNSCALE(optimization_barrier(*gradients), state))


UNSCALE = scaling.unscale_gradients
# What each fault adds to the losses, if it adds anything: see `main`.
FAULTS = {
    "none": None,
    "float32-layer": None,
    "host": asked_of_host,
    "second-sum": summed_again,
    "apart": None,
    "no-scale": None,  # no fault: for comparison
}


def main(out, model, dtype, replicas, fault):
    """Lowers the step."""
    work = work_of(model)
    policies = POLICIES | {"float8": "mixed_float8"}
    settings = {"precision": policies[dtype], "jit_compile": "step" if replicas == 1 else True}
    if fault == "no-scale":
        settings["loss_scale"] = "none"
    if fault == "apart":
        scaling.unscale_gradients = unscale_apart
    if replicas > 1:
        settings["strategy"] = fake_tpu.strategy(replicas)
    trainer = Checked(work, fault, **settings)
    spec = started(trainer, work.batch)
    if fault == "float32-layer":
        compute_in_float32(trainer.model)
    if replicas == 1:
        hlo = lower_function(trainer.train_step, work.batch)
    else:
        hlo = lower_replica(trainer, spec, zeros_like)[0].hlo
    (out / "step.hlo").write_bytes(hlo)
    sizes = {
        "trained": trainer.model.count_params() - other_floats(trainer.model),
        "other": other_floats(trainer.model),
    }
    (out / "sizes.json").write_text(json.dumps(sizes))


def other_floats(model):
    """Returns the number of floats among the weights that are not trained, such as statistics."""
    floats = [each for each in model.non_trainable_weights if each.dtype == "float32"]
    return sum(math.prod(each.shape) for each in floats)


def zeros_like(tensor):
    """Returns zeros in the shape of an input of the step; the values are not used."""
    return np.zeros(tensor.shape, tensor.dtype.as_numpy_dtype)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), sys.argv[5])

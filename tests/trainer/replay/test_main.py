"""The program `python -m trainer.replay`."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from absl import app

from trainer.replay.__main__ import main

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.parametrize("arguments", [[], ["runs/a/overflows/step-00000001", "another"]])
def test_one_record_is_named(arguments):
    """No record, or more than one, is a usage error."""
    with pytest.raises(app.UsageError):
        main(["replay", *arguments])


SCRIPT = '''
    """A trainer that overflows in its middle layer on the first batch."""
    import numpy as np
    import keras
    import tensorflow as tf
    from absl import app, flags
    from trainer import Skips, Trainer
    from trainer.flags import define_flags, make_trainer


    class Rooted(keras.layers.Layer):
        def call(self, inputs):
            return inputs + keras.ops.sqrt(0.0 * inputs)


    class Scripted(Trainer):
        def build_model(self):
            layers = [keras.layers.Dense(2, name="below"), Rooted(name="planted")]
            return keras.Sequential([keras.Input([2]), *layers, keras.layers.Dense(1)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def compute_loss(self, batch, training):
            return tf.cast(self.model(batch, training=training), tf.float32)[:, 0]


    def main(_):
        trainer = make_trainer(Scripted, verbose=False)
        if flags.FLAGS.mode == "replay":
            print(trainer.replay(flags.FLAGS.overflow))
            return
        trainer.train(np.ones([4, 2], "float32"), flags.FLAGS.steps, global_batch=4)


    if __name__ == "__main__":
        define_flags(steps=1, skips=Skips(max_records=1))
        app.run(main)
'''


@pytest.mark.slow
def test_both_programs_name_the_planted_layer(tmp_path):
    """`SCRIPT --flagfile=RUN/flags.cfg --mode=replay` and `python -m trainer.replay` print the
    same: the recorded verdict, that of the replay, and the layer.
    """
    (tmp_path / "scripted.py").write_text(textwrap.dedent(SCRIPT))
    run = tmp_path / "run"
    scale = "--precision=mixed_float16", "--loss_scale=dynamic:initial_scale=1024"
    program(tmp_path, "scripted.py", f"--model_dir={run}", *scale)
    [kept] = (run / "overflows").iterdir()
    flags = f"--flagfile={run / 'flags.cfg'}"
    by_script = program(tmp_path, "scripted.py", flags, "--mode=replay", f"--overflow={kept}")
    by_module = program(tmp_path, "-m", "trainer.replay", kept, "--trainer=scripted:Scripted")

    assert by_script == by_module
    assert by_script.splitlines() == [
        "recorded: model, in sequential/below/kernel on replica 0: 0 inf, 4 NaN",
        "now:      model, in sequential/below/kernel on replica 0: 0 inf, 4 NaN",
        "first:    the gradient of the input of layer 'planted'",
    ]


def program(folder, *arguments):
    """Runs Python in a folder; returns its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

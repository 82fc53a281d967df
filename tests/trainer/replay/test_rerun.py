"""L18: what the flight recorder keeps, and what comes of running it again."""

import os
import pathlib
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes

import scaling
from scaling import Cause
from trainer.data.batches import untuned
from trainer.replay.recorder import read_record

ROOT = pathlib.Path(__file__).parents[3]


@keras.saving.register_keras_serializable()
class Planted(keras.layers.Layer):
    """The distance from 7, which has no derivative there; at 8 it is infinite itself."""

    def call(self, inputs):
        """The root of 0 is 0, its derivative infinite."""
        broken = keras.ops.where(inputs == 8.0, keras.ops.full_like(inputs, np.inf), 0.0)
        return keras.ops.sqrt(keras.ops.square(inputs - 7.0)) + broken


class Layered(Linear):
    """Three layers, the middle one planted, with Dropout and BatchNorm, on `x` of 4 columns."""

    def build_model(self):
        """See there."""
        return keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Dropout(0.5, seed=3, name="dropout"),
                keras.layers.Dense(4, kernel_initializer="identity", name="below"),
                Planted(name="planted"),
                keras.layers.BatchNormalization(name="above"),
                keras.layers.Dense(1, name="last"),
            ]
        )

    def build_optimizer(self):
        """Hardly moves: float16 shall see a 7 where there was one."""
        return keras.optimizers.SGD(2.0**-20)


def batch(kind, example, examples=24):
    """A batch in which one example goes wrong on the way back, on the way there, or in the loss."""
    rng = np.random.default_rng(5)
    values = {
        "x": rng.normal(size=[examples, 4]).astype(np.float32),
        # All alike, BatchNorm would let no gradient through.
        "slope": rng.uniform(0.5, 1.5, examples).astype(np.float32),
    }
    if kind == "loss":
        values["slope"][example] = np.inf
    elif kind == "overflow":
        values["slope"][example] = 1e6
    elif kind:
        # Dropout halves a row or makes it 0, and doubles what it leaves.
        values["x"][example] = {"backward": 3.5, "forward": 4.0}[kind]
    return values


def record(tmp_path, kind, example=0, steps=8, **arguments):
    """Trains over one good batch and a bad one, again and again; returns the records' folders."""
    batches = [batch(None, 0), batch(kind, example)]
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]]), batches[0])
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    trainer = Layered(
        model_dir=tmp_path,
        verbose=False,
        max_overflow_records=2,
        seed=1,
        data_resume="restart",
        **arguments,
    )
    trainer.train(data, steps=steps)
    return trainer, sorted((tmp_path / "overflows").iterdir())


PLACES = {
    "backward": "the gradient of the input of layer 'planted'",
    "forward": "the output of layer 'planted'",
    "overflow": "the gradient of the output of layer 'last'",
    "loss": "the loss (all outputs of layers are finite)",
}


@pytest.mark.parametrize(
    "kind",
    [
        "backward",
        pytest.param("forward", marks=pytest.mark.slow),
        "overflow",
        pytest.param("loss", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("replicas", "num_microbatches"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2)]
)
def test_a_record_gives_the_same_verdict_and_names_the_layer(
    tmp_path, mirrored, kind, replicas, num_microbatches
):
    """L18: the same cause, in the same variable on the same replica, with the same counts, through
    Dropout; and the first layer whose output, or else whose gradient, is not finite.
    """
    settings = {
        "strategy": mirrored(replicas) if replicas > 1 else "default",
        "precision": "mixed_float16",
        "jit_compile": False,
        "loss_scale": 2.0**12,
        "num_microbatches": num_microbatches,
    }
    _, records = record(tmp_path / "run", kind, example=23, **settings)
    kept = [read_record(path)[0] for path in records]
    replay = Layered(verbose=False, **settings).replay(records[-1])

    assert replay.same, str(replay)
    assert Cause(kept[-1].cause) is (
        Cause.FORWARD if kind in ("forward", "loss") else Cause.BACKWARD
    )
    assert kept[-1].bad_replica == replicas - 1
    assert replay.place == PLACES[kind]


def test_recording_does_not_change_the_run(tmp_path):
    """A run with the recorder on ends with the bits of one without, though its loops end early."""
    rule = scaling.DynamicLossScale(2.0**12)
    half = {"precision": "mixed_float16", "jit_compile": False, "loss_scale": rule}
    trainer, _ = record(tmp_path / "a", "overflow", steps_per_loop=5, **half)
    batches = [batch(None, 0), batch("overflow", 0)]
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]]), batches[0])
    data = untuned(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs))
    plain = Layered(verbose=False, seed=1, **half)
    plain.train(data, steps=8)

    assert trainer.totals == plain.totals
    for ours, theirs in zip(trainer.model.weights, plain.model.weights, strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_only_the_first_skip_of_a_row_is_kept(tmp_path):
    """And a record that would take too much room is not, with a warning."""
    arguments = {"model_dir": tmp_path / "run", "verbose": False, "max_overflow_records": 9}
    trainer = Linear(**arguments)
    trainer.train(slopes(np.inf, 1.0), steps=5, global_batch=2)
    assert [path.name for path in (tmp_path / "run" / "overflows").iterdir()] == ["step-00000001"]

    small = Linear(**arguments | {"model_dir": tmp_path / "small", "max_overflow_bytes": 8})
    small.train(slopes(np.inf, 1.0), steps=5, global_batch=2)
    assert not (tmp_path / "small" / "overflows").exists()


def test_the_oldest_records_make_room(tmp_path):
    """All records together stay within `max_overflow_bytes`."""
    _, records = record(tmp_path, "loss")
    size = sum(path.stat().st_size for path in records[0].rglob("*") if path.is_file())
    _, kept = record(tmp_path / "again", "loss", max_overflow_bytes=int(1.5 * size))

    assert [path.name for path in records] == ["step-00000006", "step-00000008"]
    assert [path.name for path in kept] == ["step-00000008"]


def test_the_newest_record_stays_though_an_older_one_is_of_a_later_step(tmp_path):
    """A run that was taken up again comes to earlier steps; the record it makes is the one that stays."""
    _, [*_, kept] = record(tmp_path, "loss")
    later = kept.rename(kept.parent / "step-00000500")
    _, kept = record(tmp_path, "loss", steps=10)

    assert [path.name for path in kept] == ["step-00000010", "step-00000500"]
    _, kept = record(tmp_path, "loss", steps=12)

    assert [path.name for path in kept] == ["step-00000010", "step-00000012"]
    assert not later.exists()


def test_a_plain_module_is_run_again_too(tmp_path):
    """It has no layers to look into, but its random numbers are kept."""

    class Noisy(Linear):
        def build_model(self):
            model = tf.Module()
            model.weight = tf.Variable(1.0)
            model.generator = tf.random.Generator.from_seed(3)
            return model

        def compute_loss(self, batch, training):
            del training
            noise = self.model.generator.uniform([])
            # Some steps, by chance, with a slope of 3; never with one of 1, after which other
            # numbers are drawn. A skipped step takes its numbers back.
            lost = tf.where(noise * batch["slope"] > 1.5, np.inf, 1.0)
            return self.model.weight * batch["slope"] * lost

    arguments = {"verbose": False, "max_overflow_records": 9}
    data = untuned(tf.data.Dataset.from_tensor_slices(slopes(1.0, 3.0)).batch(1))
    Noisy(model_dir=tmp_path, **arguments).train(data, steps=20)
    records = sorted((tmp_path / "overflows").iterdir())
    replays = [Noisy(verbose=False).replay(path) for path in records]

    assert len(records) > 2
    assert all(replay.same for replay in replays)
    assert {replay.place for replay in replays} == {None}


def test_a_record_holds_no_code(tmp_path):
    """Nothing in it is a pickle, and arrays of objects are refused when it is read."""
    _, [path, _] = record(tmp_path, "loss")
    np.savez(path / "state.npz", **{"0/0": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match=r"`overflow` must be a folder that .* cannot be read"):
        read_record(path)


def test_what_cannot_be_run_again_is_refused(tmp_path):
    """Another setting, another model, or no record at all."""
    _, [path, _] = record(tmp_path, "loss")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        Layered(verbose=False, num_microbatches=2).replay(path)
    assert str(error.value) == (
        "`num_microbatches` must be the same as in the recorded run; got 2, and the record has 1. "
        "With another setting the step may end differently. Create the trainer with the settings of "
        "that run."
    )
    with pytest.raises(ValueError, match=r"`overflow` must be a record of the same model"):
        Linear(verbose=False).replay(path)
    with pytest.raises(ValueError, match=r"must be a folder that the flight recorder wrote"):
        Layered(verbose=False).replay(tmp_path)


SCRIPT = '''
    """A trainer whose middle layer is planted; the first batch overflows there."""
    import numpy as np
    import keras
    import tensorflow as tf
    from absl import app, flags
    from trainer import Trainer
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
        trainer.train(np.ones([4, 2], "float32"), flags.FLAGS.train_steps, global_batch=4)


    if __name__ == "__main__":
        define_flags(train_steps=1, max_overflow_records=1)
        app.run(main)
'''


@pytest.mark.slow
def test_both_programs_name_the_planted_layer(tmp_path):
    """`SCRIPT --flagfile=RUN/flags.cfg --mode=replay` and `python -m trainer.replay` print the same:
    the recorded verdict again, and the layer.
    """
    (tmp_path / "scripted.py").write_text(textwrap.dedent(SCRIPT))
    run = tmp_path / "run"
    program(tmp_path, "scripted.py", f"--model_dir={run}")
    [kept] = (run / "overflows").iterdir()
    flags = f"--flagfile={run / 'flags.cfg'}"
    by_script = program(tmp_path, "scripted.py", flags, "--mode=replay", f"--overflow={kept}")
    by_module = program(tmp_path, "-m", "trainer.replay", kept, "--trainer=scripted:Scripted")

    assert by_script == by_module
    assert by_script.splitlines() == [
        "recorded: backward, in sequential/below/kernel on replica 0: 0 inf, 4 NaN",
        "now:      backward, in sequential/below/kernel on replica 0: 0 inf, 4 NaN",
        "first:    the gradient of the input of layer 'planted'",
    ]


def program(folder, *arguments):
    """Runs Python in a folder; returns what it printed."""
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

"""L11: no run is silently stuck. It ends with an error that says why and what to try."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, all_copies, assert_same_bits, slopes

import scaling
from scaling import Cause
from trainer import Checkpoints, Skips, StepReport, Totals, TrainingStuckError
from trainer.callbacks.stuck import check_not_stuck

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(3)]

HALF = {"precision": "mixed_float16", "jit_compile": False}


def reports(*causes, consecutive_skips=0, scales=None):
    """Reports of one step per cause, after as many skipped steps in a row."""
    steps = len(causes)
    rows = []
    for cause in causes:
        consecutive_skips = 0 if cause is Cause.NONE else consecutive_skips + 1
        rows.append(consecutive_skips)
    fields = dict.fromkeys(StepReport._fields, np.zeros(steps, np.int32))
    fields |= {
        "step": np.arange(1, steps + 1),
        "cause": np.array(causes, np.int32),
        "grads_finite": np.array([cause is Cause.NONE for cause in causes]),
        "consecutive_skips": np.array(rows),
        "loss_scale": np.array(scales or [1.0] * steps),
        "bad_replica": np.full(steps, -1),
        "bad_variable": np.full(steps, -1),
        "inf_count": np.ones(steps, np.int32),
    }
    return StepReport(**fields)


def tells(error, *parts):
    """Returns whether an error names the step, the cause and so on."""
    return all(part in str(error.value) for part in parts)


class Hidden(Linear):
    """Float16 layers whose activations overflow for a slope of 12, while the loss stays finite."""

    def compute_loss(self, batch, training):
        """One over the activation: 0 if that is inf, with NaN gradients at every scale."""
        activation = self.model(batch["x"], training=training)
        activation *= tf.cast(tf.exp(batch["slope"]), tf.float16)
        return tf.cast(1.0 / activation[:, 0], tf.float32)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_overflow_of_the_forward_pass_moves_no_scale(mirrored, replicas, num_microbatches):
    """L17: where inf in the forward pass leaves the loss finite and the gradients NaN, the cause is the
    model, at any scale, and the scale stays. An overflow that a smaller scale cures still lowers it, and
    with attribute_causes=False everything does.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    examples = 2 * replicas
    slope = np.zeros([4, examples], np.float32)
    slope[1, -1] = slope[3, -1] = 12.0
    data = {"x": np.ones([4, examples, 1], np.float32), "slope": slope}
    found = {}
    for attribute_causes in (True, False):
        trainer = Hidden(
            strategy=strategy,
            num_microbatches=num_microbatches,
            skips=Skips(attribute_causes=attribute_causes),
            loss_scale=scaling.DynamicLossScale(2.0**10),
            verbose=False,
            **HALF,
        )
        totals = trainer.train(untuned(tf.data.Dataset.from_tensor_slices(data)), steps=4).totals
        found[attribute_causes] = totals.skipped_by_cause, trainer.loss_scale

    assert found == {True: ({"model": 2}, 2.0**10), False: ({"backward": 2}, 2.0**8)}


def test_good_steps_after_the_last_one_do_not_save_a_run():
    """Parameter servers may take some before the chief has read the reports."""
    policy = Skips(max_consecutive=2, on_nonfinite_loss="raise")
    stuck = [Cause.NONE, Cause.BACKWARD, Cause.BACKWARD, Cause.NONE, Cause.BACKWARD]
    with pytest.raises(TrainingStuckError, match="2 steps in a row were skipped by step 3"):
        check_not_stuck(reports(*stuck), policy, [])
    bad_loss = [Cause.FORWARD, Cause.NONE, Cause.BACKWARD]
    with pytest.raises(TrainingStuckError, match="the loss was not finite at step 1"):
        check_not_stuck(reports(*bad_loss), policy, [])


@pytest.mark.parametrize(
    ("causes", "before", "warnings"),
    [
        ([Cause.FORWARD, Cause.FORWARD], 0, 1),
        ([Cause.FORWARD, Cause.NONE, Cause.FORWARD], 0, 1),
        ([Cause.FORWARD], 1, 0),
        ([Cause.BACKWARD], 0, 0),
    ],
)
def test_a_bad_loss_warns_once_per_row_of_skips(caplog, causes, before, warnings):
    """Only the first skip of a row warns; an overflow does not warn at all."""
    with caplog.at_level("WARNING"):
        check_not_stuck(reports(*causes, consecutive_skips=before), Skips(), [])

    assert [text.split(":")[0] for text in warnings_in(caplog)] == [
        "step skipped, cause forward"
    ] * warnings


class Two(Linear):
    """Two dense layers in float32."""

    def build_model(self):
        """All weights are 1."""
        layers = [
            keras.layers.Dense(units, use_bias=False, kernel_initializer="ones") for units in (2, 1)
        ]
        return keras.Sequential([keras.Input([1]), *layers])

    def build_optimizer(self):
        """A low learning rate, so that the loss stays small."""
        return keras.optimizers.SGD(2.0**-10, momentum=0.5)


def batches_of(*slopes_in_turn, replicas=1):
    """A dataset of batches with one slope each, the same on every replica."""
    slope = np.repeat(np.float32(slopes_in_turn)[:, None], replicas, axis=1)
    data = {"x": np.ones([*slope.shape, 1], np.float32), "slope": slope}
    return untuned(tf.data.Dataset.from_tensor_slices(data))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "value", "counts"), [(1, np.nan, "0 inf, 1 NaN"), (3, -np.inf, "1 inf, 0 NaN")]
)
def test_a_weight_that_is_not_finite_ends_the_run(tmp_path, mirrored, replicas, value, counts):
    """L17: one bad element in one weight ends the run at once: no further step runs in that graph
    call, no other weight or slot moves, and the previous checkpoint stays the newest.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    arguments = {
        "model_dir": tmp_path,
        "verbose": False,
        "checkpoints": Checkpoints(interval=10),
        "strategy": strategy,
    }
    trainer = Two(loss_scale="dynamic", **arguments)
    data = batches_of(1.0, replicas=replicas)
    trainer.train(data, steps=4)
    good = all_copies(trainer)
    trainer.model.trainable_variables[1].assign([[1.0], [value]])
    before = all_copies(trainer)
    with pytest.raises(TrainingStuckError) as error:
        trainer.train(data, steps=40)

    name = trainer.model.trainable_variables[1].path
    assert tells(error, "weights were not finite at step 5", name, counts, "2^15")
    assert trainer.totals == Totals(4, {"weights": 1})
    assert_same_bits(before, all_copies(trainer))
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-4"]
    resumed = Two(loss_scale="dynamic", **arguments)
    resumed.train(data, steps=4)
    assert list(map(repr, good.values())) == list(map(repr, all_copies(resumed).values()))
    assert resumed.train(data, steps=6).totals == Totals(6, {})


def test_weights_that_an_update_ruined_end_the_run():
    """L17: an applied step can leave an infinite weight, here because of the learning rate. The
    next step, in the same graph call, ends the run.
    """

    class Rising(Linear):
        def build_optimizer(self):
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 3e38])
            return keras.optimizers.SGD(rate)

    trainer = Rising(verbose=False, steps_per_loop=20)
    with pytest.raises(
        TrainingStuckError,
        match="the weights were not finite at step 4",
    ):
        trainer.train(batches_of(4.0), steps=40)

    assert trainer.totals == Totals(3, {"weights": 1})
    assert trainer.weight == -np.inf


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_loss_that_is_not_finite_ends_the_run_if_asked(mirrored, replicas):
    """L11: on_nonfinite_loss="raise" ends the run at the step with the bad loss, in the middle of a
    graph call, and not at an overflow before it. "skip" skips the batch and continues.
    """
    history = [1.0, 2.0**12, 1.0, np.nan, 1.0, 1.0]
    slope = np.ones([len(history), replicas], np.float32)
    slope[:, -1] = history
    # Each replica's share of the mean is a power of two, exact in float16.
    data = {"x": np.ones([*slope.shape, 1], np.float32), "slope": replicas * slope}
    made = {
        choice: Linear(
            strategy=mirrored(replicas) if replicas > 1 else "default",
            loss_scale="dynamic",
            skips=Skips(on_nonfinite_loss=choice),
            verbose=False,
            **HALF,
        )
        for choice in ("raise", "skip")
    }
    with pytest.raises(TrainingStuckError) as error:
        made["raise"].train(untuned(tf.data.Dataset.from_tensor_slices(data)), steps=6)
    totals = made["skip"].train(untuned(tf.data.Dataset.from_tensor_slices(data)), steps=6).totals

    assert tells(error, "loss was not finite at step 4", f"replica {replicas - 1}", "2^15, 2^14")
    assert made["raise"].totals == Totals(2, {"forward": 1, "backward": 1})
    assert made["raise"].weight == 1.0 - 2 * replicas
    assert totals == Totals(4, {"forward": 1, "backward": 1})
    assert made["skip"].weight == 1.0 - 4 * replicas


def test_max_consecutive_skips_ends_the_run():
    """L11: the run ends at the `max_consecutive`-th consecutive skip, wherever the graph call
    would end. Skips that are not consecutive do not end it.
    """
    trainer = Linear(
        loss_scale="dynamic", skips=Skips(max_consecutive=3), steps_per_loop=7, verbose=False
    )
    history = [np.inf, np.inf, 1.0, np.nan, np.inf, 1.0, 1.0, np.inf, np.nan, -np.inf, 1.0, 1.0]
    with pytest.raises(TrainingStuckError) as error:
        trainer.train(batches_of(*history), steps=12)

    assert tells(error, "3 steps in a row", "step 10", "forward", "replica 0", "2^15")
    assert trainer.totals == Totals(3, {"forward": 7})
    assert trainer.weight == -2.0
    assert trainer.train(batches_of(1.0), steps=12).totals == Totals(5, {"forward": 7})


def holding(**arguments):
    """A run with on_stuck="hold": it warns, and ends after ten times two consecutive skips."""
    return Linear(
        loss_scale="dynamic",
        skips=Skips(on_stuck="hold", max_consecutive=2),
        steps_per_loop=3,
        log_interval=6,
        verbose=False,
        **arguments,
    )


def warnings_in(caplog):
    """The messages logged as warnings."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_holding_warns_and_then_ends(caplog):
    """L11: "hold" warns at every log line and ends the run after ten times
    `max_consecutive`.
    """
    trainer = holding()
    with caplog.at_level("WARNING"), pytest.raises(TrainingStuckError) as error:
        trainer.train(batches_of(np.nan), steps=100)

    assert tells(error, "20 steps in a row", "step 20", "forward", "2^15")
    first, *others = warnings_in(caplog)
    assert "forward" in first
    assert [text.split()[0] for text in others] == ["6", "12", "18"]
    assert trainer.totals == Totals(0, {"forward": 20})


def test_holding_goes_on_when_good_batches_come_back(caplog):
    """L11: a run that holds applies the next good batch and starts counting again."""
    trainer = holding()
    history = [*[np.inf] * 12, 1.0, *[np.inf] * 19, 1.0, 1.0]
    with caplog.at_level("WARNING"):
        totals = trainer.train(batches_of(*history), steps=len(history)).totals

    assert totals == Totals(3, {"forward": 31})
    assert trainer.weight == -2.0
    counts = [text.split()[0] for text in warnings_in(caplog) if "in a row" in text]
    assert counts == ["6", "12", "5", "11", "17"]


@pytest.mark.thorough
def test_what_float32_cannot_take_either_ends_the_run():
    """L11: if the float32 step is skipped too, the run ends."""
    floor = scaling.DynamicLossScale(1.0, min_scale=1.0)
    trainer = Linear(
        loss_scale=floor, skips=Skips(on_stuck="float32", max_consecutive=4), verbose=False, **HALF
    )
    with pytest.raises(TrainingStuckError) as error:
        trainer.train(batches_of(np.nan), steps=50)

    assert tells(error, "5 steps in a row", "step 5", "forward", "2^0")
    assert trainer.totals == Totals(0, {"forward": 5}, float32_steps=1)
    assert trainer.weight == 1.0


def test_a_run_that_overflows_at_every_scale_ends(tmp_path):
    """The error names the variable; what was logged by then is on disk. L17: no scale was tried in
    vain.
    """

    class Rooted(Linear):
        def compute_loss(self, batch, training):
            # The square root of 0 is 0, and its derivative is infinite.
            return tf.sqrt(0.0 * super().compute_loss(batch, training))

    trainer = Rooted(
        loss_scale="dynamic",
        model_dir=tmp_path,
        skips=Skips(max_consecutive=40),
        log_interval=50,
        steps_per_loop=50,
        verbose=False,
    )
    with pytest.raises(TrainingStuckError) as error:
        trainer.train(slopes(1.0, 1.0, 1.0, 1.0), steps=200, global_batch=4)

    name = trainer.model.trainable_variables[0].path
    assert tells(error, "40 steps in a row", "model", name, "replica 0", "2^15")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line["split"] == "train"]
    assert line["loss"] is None
    skips = [line for line in lines if line["split"] == "skip"]
    assert [skip["cause"] for skip in skips] == ["model"] * 40
    assert {(skip["variable"], skip["replica"], skip["nan_count"]) for skip in skips} == {
        (name, 0, 1)
    }
    assert trainer.loss_scale == 2.0**15
    assert trainer.weight == 1.0

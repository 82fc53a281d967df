"""A run that diverges is taken back to where all was well, a bounded number of times."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, assert_same_bits

from trainer import DivergedError, Divergence
from trainer.checkpoint.folder import committed
from trainer.monitor.divergence import LossWatch
from trainer.step.report import StepReport


class Noisy(Linear):
    """Its loss is the slope of the batch; Dropout's noise shows whether numbers are drawn anew."""

    def build_model(self):
        """The weight, behind a dropout."""
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([1]), keras.layers.Dropout(0.5), dense])

    def build_optimizer(self):
        """So slow that the loss is what the data say."""
        return keras.optimizers.SGD(1e-6, momentum=0.9)

    def compute_loss(self, batch, training):
        """The slope, and a trace of the noise."""
        predictions = tf.cast(self.model(batch["x"], training=training), tf.float32)
        return batch["slope"] + 1e-3 * predictions[:, 0]

    def on_recovery(self, step, restored):
        """Writes it down."""
        self.__dict__.setdefault("recovered", []).append((step, restored))


def data(*slopes):
    """Batches of two examples, one after the other, with a slope each."""
    batches = {
        "x": np.ones([len(slopes), 2, 1], np.float32),
        "slope": np.repeat(np.array(slopes, np.float32)[:, None], 2, axis=1),
    }
    return tf.data.Dataset.from_tensor_slices(batches)


def run(model_dir, divergence, steps, slopes, **arguments):
    """Trains on these slopes, one step each; returns the trainer."""
    arguments = {"checkpoint_interval": 2, "steps_per_loop": 3, "log_interval": 1} | arguments
    trainer = Noisy(model_dir=model_dir, divergence=divergence, seed=1, verbose=False, **arguments)
    trainer.train(data(*slopes), steps=steps)
    return trainer


def recoveries(model_dir):
    """The lines of `metrics.jsonl` that tell of them."""
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["split"] == "recovery"]


def reports(losses, first=1, applied=None):
    """Reports of as many steps."""
    applied = np.ones(len(losses), bool) if applied is None else np.array(applied)
    fields = dict.fromkeys(StepReport._fields, np.zeros(len(losses)))
    fields |= {
        "step": np.arange(first, first + len(losses)),
        "loss": np.array(losses, np.float32),
        "grads_finite": applied,
    }
    return StepReport(**fields)


def test_a_loss_above_the_bound_restores_and_leaves_out_the_span(tmp_path):
    """The newest checkpoint before the offence is restored, and with skip_data the batches from there
    to the offence, it included, are left out: the run ends with the bits of one that was never
    given them, but for its noise. All of it is recorded.
    """
    slopes = [1, 1, 1, 1, 1, 50, 1, 1, 1, 1]
    trainer = run(tmp_path, Divergence(loss_above=10.0, skip_data=True), 8, slopes)

    assert trainer.recovered == [(6, 4)]
    [line] = recoveries(tmp_path)
    assert line.pop("what").endswith(" above 10 at step 6")
    assert line == {"step": 6, "split": "recovery", "restored": 4, "batches_left_out": 2}
    position = trainer._trained_on[1]
    assert (trainer.totals.attempted, position.taken) == (8, 10)
    saved = json.loads((tmp_path / "ckpt-8" / "run.json").read_text())
    assert (saved["batches_taken"], saved["divergence"]["recoveries"]) == (10, 1)


def test_without_leaving_out_data_the_run_comes_to_the_same_batch(tmp_path):
    """A bounded number of times: the same batch is as bad each time, so the run ends, restored to the
    last good checkpoint, with an error that says what, how often, and where it stands.
    """
    slopes = [1, 1, 1, 50, 1]
    divergence = Divergence(loss_above=10.0, max_recoveries=2)
    with pytest.raises(DivergedError) as caught:
        run(tmp_path, divergence, 5, slopes)

    message = str(caught.value)
    start, rest = message.split("; got ")
    what, rest = rest.split(", after ")
    assert start == "`divergence` must not be met more than 2 times"
    assert what.endswith(" above 10 at step 4")
    assert rest == (
        f"2 recoveries. The last good checkpoint, {tmp_path / 'ckpt-2'}, was restored. Lower the "
        "learning rate, clip, or look at the data of these steps."
    )
    assert [line["restored"] for line in recoveries(tmp_path)] == [2, 2]
    assert list(committed(tmp_path, "ckpt")) == [0, 2]


def test_each_recovery_draws_other_numbers(tmp_path):
    """With the same numbers the same batches would come to the same end."""
    drawn = []

    class Drawing(Noisy):
        def on_recovery(self, step, restored):
            drawn.append(int(self._parts.state.random_seed.numpy()))

    trainer = Drawing(
        model_dir=tmp_path,
        divergence=Divergence(loss_above=10.0, max_recoveries=2),
        checkpoint_interval=2,
        log_interval=1,
        steps_per_loop=1,
        seed=1,
        verbose=False,
    )
    with pytest.raises(DivergedError):
        trainer.train(data(1, 1, 1, 50, 1), steps=5)

    assert drawn == [2, 3]


def test_a_killed_run_remembers_its_recoveries(tmp_path):
    """What was left out and how often the run was taken back are saved at once: started again right
    after a recovery, it ends as if it had gone on.
    """
    slopes = [1, 1, 1, 1, 1, 50, 1, 1, 1, 1]
    divergence = Divergence(loss_above=10.0, skip_data=True)

    class Stopped(Noisy):
        def on_loop_begin(self, step):
            if getattr(self, "recovered", None):
                raise SystemExit

    whole = run(tmp_path / "whole", divergence, 8, slopes)
    killed = Stopped(
        model_dir=tmp_path / "killed",
        divergence=divergence,
        checkpoint_interval=2,
        log_interval=1,
        steps_per_loop=3,
        seed=1,
        verbose=False,
    )
    with pytest.raises(SystemExit):
        killed.train(data(*slopes), steps=8)
    again = run(tmp_path / "killed", divergence, 8, slopes)

    assert not hasattr(again, "recovered")
    ends = [list(all_copies(trainer).values()) for trainer in (whole, again)]
    assert_same_bits(*[dict(enumerate(end)) for end in ends])
    assert again._watch.state() == whole._watch.state()
    assert again._trained_on[1].taken == whole._trained_on[1].taken == 10


def test_a_loss_that_rises_past_a_window(tmp_path):
    """The mean loss of the last window is held against the lowest such mean before; the checkpoint is
    from before that window began, and later ones, which are no longer good, go.
    """
    # Means of three: 4, 4, 4.33, 5, 6.33 at step 7: more than 1.5 x 4. The window began at step 5.
    slopes = [4, 4, 4, 4, 5, 6, 8, 4, 4, 4, 4, 4]
    divergence = Divergence(rise=1.5, window=3, max_recoveries=1, skip_data=True)
    trainer = run(tmp_path, divergence, 8, slopes)

    [line] = recoveries(tmp_path)
    assert (line["step"], line["restored"], line["batches_left_out"]) == (7, 4, 3)
    assert (trainer.totals.attempted, trainer._trained_on[1].taken) == (8, 11)


def test_what_the_watch_sees():
    """Only applied steps count; the offence is the first; the window begins with its first step."""
    bound = LossWatch(Divergence(loss_above=2.0))
    assert bound.look(reports([1.0, 2.0, 9.0], applied=[True, True, False])) is None
    found = bound.look(reports([1.0, 3.0, 9.0], first=4))
    assert (found.first, found.last, found.what) == (5, 5, "loss 3 above 2 at step 5")

    rise = LossWatch(Divergence(rise=2.0, window=2))
    assert rise.look(reports([1.0, 1.0, 2.0])) is None
    found = rise.look(reports([2.5], first=4))
    assert (found.first, found.last) == (3, 4)
    assert found.what == "mean loss 2.25 of steps 3 to 4 above 2 x 1"


def test_the_watch_goes_on_where_it_was():
    """Its state, through JSON, is all that it remembers."""
    losses = [3.0, 1.0, 1.5, 1.0, 2.5, 2.0, 9.0]
    whole = LossWatch(Divergence(rise=3.0, window=2))
    expected = [whole.look(reports([loss], first=place)) for place, loss in enumerate(losses)]
    assert expected[-1] is not None
    for cut in range(len(losses)):
        before = LossWatch(Divergence(rise=3.0, window=2))
        found = [before.look(reports([loss], first=i)) for i, loss in enumerate(losses[:cut])]
        after = LossWatch(Divergence(rise=3.0, window=2))
        after.set_state(json.loads(json.dumps(before.state())))
        found += [after.look(reports([loss], first=i + cut)) for i, loss in enumerate(losses[cut:])]

        assert found == expected


def test_without_a_checkpoint_before_the_offence_the_run_ends(tmp_path):
    """A window that reaches back past the oldest checkpoint leaves nowhere to go."""
    divergence = Divergence(rise=1.5, window=6)
    slopes = [1] * 6 + [3] * 6
    with pytest.raises(DivergedError, match="There is no checkpoint of a step before that"):
        run(tmp_path, divergence, 12, slopes, max_to_keep=1, checkpoint_interval=3)

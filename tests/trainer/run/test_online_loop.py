"""`train_on_batch`: the laws of `train`, for batches that are made during training."""

import contextlib
import gc
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEEP, Linear, all_copies, assert_same_bits, overflowing, slopes

from trainer import (
    Action,
    Callback,
    Checkpoints,
    Skips,
    Trainer,
    TrainingStuckError,
    Updates,
)

X = np.random.default_rng(0).normal(size=[24, 2]).astype(np.float32)
BATCHES = [(X[begin : begin + 4], X[begin : begin + 4, :1]) for begin in range(0, 24, 4)]
BATCHES[2] = (1e6 * BATCHES[2][0], BATCHES[2][1])  # overflows in float16


SETTINGS = {"seed": 1, "verbose": False, "jit_compile": False}


def model():
    """Draws random numbers, and keeps statistics."""
    layers = [
        keras.layers.Dense(3, name="first"),
        keras.layers.BatchNormalization(name="normalized"),
        keras.layers.Dropout(0.5, seed=1),
        keras.layers.Dense(1, name="last"),
    ]
    return keras.Sequential([keras.Input([2]), *layers], name="network")


def network(**arguments):
    """A trainer of `model`, with a metric."""
    return Trainer(
        model=model,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        loss_fn="mse",
        metrics=["mae"],
        **SETTINGS | arguments,
    )


def dataset():
    """The batches as data for `train`."""
    x, y = (np.concatenate(part) for part in zip(*BATCHES, strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        pytest.param("float32", 1, marks=pytest.mark.slow),
        pytest.param("mixed_float16", 1, marks=pytest.mark.thorough),
        pytest.param("mixed_float16", 2, marks=pytest.mark.slow),
    ],
)
def test_steps_on_batches_are_the_steps_of_train(precision, replicas, mirrored):
    """Six calls leave the bits that `train` leaves after six steps, with skips, scale and counts."""
    settings = {"precision": precision, "strategy": mirrored(replicas)}
    one, other = network(**settings), network(**settings)
    losses = [one.train_on_batch(batch)["loss"] for batch in BATCHES]
    summary = other.train(dataset(), 6)
    # `train` has ended with a log line, at which metrics begin again.
    assert_same_bits(all_copies(one, metrics=False), all_copies(other, metrics=False))
    assert (one.totals, one.loss_scale) == (other.totals, other.loss_scale)
    assert (one.totals.skipped > 0) == (precision != "float32")
    if precision == "float32":
        np.testing.assert_allclose(np.mean(losses), summary.history["loss"][-1], rtol=1e-5)


@pytest.mark.thorough
def test_metrics_are_those_since_the_last_log_line(tmp_path):
    """A call returns its batch's loss and the metrics since the last log line, and logs every
    `log_interval` steps; the steps after the last line are logged when `train` begins.
    """
    line = network(log_interval=2, model_dir=tmp_path)
    found = [line.train_on_batch(BATCHES[place]) for place in (0, 1, 3)]
    line.train(dataset(), 4)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    train = {each["step"]: each for each in lines if each["split"] == "train"}
    assert [*train] == [2, 3, 4]
    assert train[2]["mae"] == pytest.approx(found[1]["mae"])
    assert train[3]["mae"] == pytest.approx(found[2]["mae"])
    assert train[2]["loss"] == pytest.approx(np.mean([each["loss"] for each in found[:2]]))


@pytest.mark.thorough
def test_sizes_may_differ():
    """Batches of many sizes are trained on, with two traces."""
    line = Linear(verbose=False)
    for size in (1, 3, 2, 5):
        line.train_on_batch(slopes(*[1.0] * size))
    assert line.weight == -3
    assert line._parts.run_batch.experimental_get_tracing_count() == 2


@pytest.mark.thorough
def test_it_mixes_with_train():
    """Calls in any order count their steps together, and `train` goes on in its data."""
    alone, mixed = Linear(verbose=False), Linear(verbose=False)
    data = slopes(1.0, 2.0, 4.0, 8.0)
    alone.train(data, 3, global_batch=1)
    mixed.train(data, 2, global_batch=1)
    assert mixed.train_on_batch(slopes(100.0))["loss"] == 100 * mixed.weight + 100 * 100
    mixed.train(data, 4, global_batch=1)
    assert mixed.weight == alone.weight - 100
    assert mixed.totals.attempted == 4


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """A run that is stopped among its batches goes on to the bits of an uninterrupted one, and so
    does its data.
    """

    def program(trainer, stop=False):
        data = dataset()
        trainer.train(data, 2)
        for place in range(trainer.totals.attempted - 2, 4):
            trainer.train_on_batch(BATCHES[place])
            if stop and place == 1:
                trainer.save_checkpoint()
                return
        trainer.train(data, 8)

    whole = network(precision="mixed_float16")
    program(whole)
    program(network(precision="mixed_float16", model_dir=tmp_path), stop=True)
    resumed = network(precision="mixed_float16", model_dir=tmp_path)
    program(resumed)
    assert_same_bits(all_copies(whole), all_copies(resumed))
    assert whole.totals == resumed.totals


@pytest.mark.thorough
def test_a_run_without_data_resumes(tmp_path):
    """A run that never called `train` is saved by its interval and resumed by its first batch;
    then `train` may take it over.
    """
    line = Linear(model_dir=tmp_path, checkpoints=Checkpoints(interval=2), verbose=False)
    for _ in range(3):
        line.train_on_batch(slopes(1.0))
    with pytest.raises(RuntimeError, match="`model_dir` must"):
        Linear(model_dir=tmp_path, verbose=False).train_on_batch(slopes(1.0))
    del line  # as when its process ends
    gc.collect()
    resumed = Linear(model_dir=tmp_path, verbose=False)
    resumed.train_on_batch(slopes(10.0))
    assert (resumed.weight, resumed.totals.attempted) == (1 - 2 - 10, 3)
    resumed.save_checkpoint()
    taken_over = Linear(model_dir=tmp_path, verbose=False)
    taken_over.train(slopes(1.0, 1.0), 5, global_batch=2)
    assert taken_over.weight == 1 - 2 - 10 - 2


def line(folder, **arguments):
    """A trainer whose bits tell the order of the rows of its data."""
    return Trainer(
        model=lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn="mse",
        model_dir=folder,
        **SETTINGS | arguments,
    )


ROWS = X, X[:, :1]  # arrays are shuffled by the seed and the step at which they begin


def restarted(program, folder):
    """Checks that a program that is started again ends with the bits of one that is not."""
    whole = program(folder / "whole")
    program(folder / "cut", stop=True)
    again = program(folder / "cut")
    assert_same_bits(all_copies(whole), all_copies(again))


@pytest.mark.thorough
def test_data_begins_at_the_same_step_after_a_restart(tmp_path):
    """`train` after batches alone shuffles arrays as it does without a restart in between."""

    def program(folder, *, stop=False):
        trainer = line(folder)
        for _ in range(trainer.restore(BATCHES[0]), 3):
            trainer.train_on_batch(BATCHES[0])
        trainer.save_checkpoint()
        if not stop:
            trainer.train(ROWS, 8, global_batch=4)
        return trainer

    restarted(program, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("arrays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_other_data_may_follow_after_a_restart(tmp_path, arrays):
    """A call of `train` that had ended before the batches does not bind the next one, which may have
    other values or another size of a batch; and the same data goes on in its place.
    """
    first, second = (ROWS, tuple(2 * part for part in ROWS)) if arrays else (dataset(), None)
    settings = {"global_batch": 4} if arrays else {}
    for following in (first, dataset().take(3) if second is None else second):

        def program(folder, *, stop=False):
            trainer = line(folder)
            trainer.train(first, 4, **settings)
            for _ in range(trainer.totals.attempted, 6):
                trainer.train_on_batch(BATCHES[0])
            trainer.save_checkpoint()
            if not stop:
                trainer.train(following, 10, **settings)  # noqa: B023  # called in this round
            return trainer

        restarted(program, tmp_path / str(following is first))


@pytest.mark.thorough
@pytest.mark.parametrize("last", ["first", "second"])
def test_a_restart_between_two_calls_keeps_both_places(tmp_path, last):
    """Two calls with different data repeat nothing, and a third one goes on as without a restart."""
    doubled = tuple(2 * part for part in ROWS)

    def program(folder, *, stop=False):
        trainer = line(folder)
        trainer.train(ROWS, 4, global_batch=4)
        trainer.train(doubled, 7, global_batch=4)
        if not stop:
            trainer.train({"first": ROWS, "second": doubled}[last], 11, global_batch=4)
        return trainer

    restarted(program, tmp_path)


@pytest.mark.thorough
def test_the_place_in_data_is_not_lost_without_a_word(tmp_path):
    """A program that takes a batch before `train` has opened the data is told what to do."""

    def begun(folder, **arguments):
        trainer = line(folder, **arguments)
        if trainer.restore(BATCHES[0]) < 4:
            trainer.train(ROWS, 4, global_batch=4)
        return trainer

    def ended(trainer):
        trainer.train_on_batch(BATCHES[0])
        trainer.train(ROWS, 10, global_batch=4)
        return trainer

    whole = ended(begun(tmp_path / "whole"))
    begun(tmp_path / "cut")
    resumed = begun(tmp_path / "cut")
    with pytest.raises(ValueError, match="`train_on_batch`"):
        resumed.train_on_batch(BATCHES[0])
    resumed.train(ROWS, 4, global_batch=4)
    assert_same_bits(all_copies(whole), all_copies(ended(resumed)))

    begun(tmp_path / "anew")
    anew = ended(begun(tmp_path / "anew", checkpoints=Checkpoints(data_resume="restart")))
    assert anew.totals.attempted == 10


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        {"train_data": ROWS, "steps": 12},
        {"train_data": (X[:, :1], X[:, :1]), "steps": 12, "global_batch": 4},
        {"train_data": (X[:3], X[:, :1]), "steps": 12, "global_batch": 4},
        {"train_data": None, "steps": 12},
        {"train_data": tuple(2 * part for part in ROWS), "steps": 4, "global_batch": 4},
        {"train_data": ROWS, "steps": 4, "global_batch": 8},
    ],
    ids=["no size", "shape", "lengths", "none", "other reached", "size reached"],
)
def test_a_call_without_steps_leaves_the_place_in_the_data(arguments):
    """A call that is refused, or whose steps have been taken, changes nothing."""
    plain, called = line(None), line(None)
    for trainer in (plain, called):
        trainer.train(ROWS, 4, global_batch=4)
        if trainer is called:
            with contextlib.suppress(TypeError, ValueError):
                assert trainer.train(**arguments).steps_run == 0
        trainer.train(ROWS, 8, global_batch=4)
    assert_same_bits(all_copies(plain), all_copies(called))


class Broken(Callback):
    """Ends the third step as Ctrl-C or a fault would."""

    def __init__(self, error):
        """Stores the error."""
        self.error = error

    def on_loop_end(self, step):
        """Raises it, once."""
        if step == 3:
            raise self.error


@pytest.mark.thorough
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        pytest.param(OSError("the disk is gone"), marks=pytest.mark.thorough),
        pytest.param(
            tf.errors.NotFoundError(None, None, "of a file that a callback reads"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["Ctrl-C", "Python", "TensorFlow"],
)
def test_what_was_taken_before_an_error_can_be_saved(tmp_path, error):
    """`save_checkpoint` saves the steps before an error or Ctrl-C; a new trainer goes on from them."""
    line = Linear(model_dir=tmp_path, callbacks=[Broken(error)], verbose=False)
    for _ in range(2):
        line.train_on_batch(slopes(1.0))
    with pytest.raises(type(error)):
        line.train_on_batch(slopes(1.0))
    line.save_checkpoint()
    line.save_checkpoint()  # is saved already

    assert [path.name for path in tmp_path.glob("ckpt-*")] == ["ckpt-3"]
    resumed = Linear(model_dir=tmp_path, verbose=False)
    resumed.train_on_batch(slopes(10.0))
    assert (resumed.weight, resumed.totals.attempted) == (1 - 3 - 10, 4)


class Fails(Linear):
    """Fails in a metric, after the update: the step was applied, and is not counted."""

    def update_metrics(self, batch, aux):
        """Takes no steep slope."""
        tf.debugging.assert_less(batch["slope"], 9.0, message="too steep")


def test_a_step_that_failed_midway_is_not_saved(tmp_path):
    """A checkpoint would hold a part of it."""
    line = Fails(model_dir=tmp_path, verbose=False, jit_compile=False)
    line.train_on_batch(slopes(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError):
        line.train_on_batch(slopes(10.0))
    with pytest.raises(RuntimeError, match="cannot be saved"):
        line.save_checkpoint()


@pytest.mark.thorough
@pytest.mark.parametrize("online", [True, False])
def test_going_on_after_a_step_that_failed_midway_is_not_silent(online, caplog):
    """Nobody knows which part of the step the variables hold; the next call says so, once."""
    line = Fails(verbose=False, jit_compile=False)

    def take(slope, step):
        batch = slopes(slope)
        if online:
            line.train_on_batch(batch)
        else:
            line.train(tf.data.Dataset.from_tensors(batch), step)

    take(1.0, 1)
    with pytest.raises(tf.errors.InvalidArgumentError):
        take(10.0, 2)
    assert not [text for text in caplog.messages if "An operation failed" in text]
    take(1.0, 2)
    take(1.0, 3)

    [message] = [text for text in caplog.messages if "An operation failed" in text]
    assert "too steep" in message


def test_without_checkpoints_nothing_is_saved_without_a_word(tmp_path):
    """`Checkpoints(enabled=False)` is an error then."""
    line = Linear(model_dir=tmp_path, checkpoints=Checkpoints(enabled=False), verbose=False)
    line.train_on_batch(slopes(1.0))
    with pytest.raises(ValueError, match="`enabled`"):
        line.save_checkpoint()


@pytest.mark.thorough
def test_what_comes_after_a_step_happens():
    """Actions and hooks are called at their steps; a change between calls counts at once."""
    seen = []

    class Heard(Linear):
        def on_loop_end(self, step):
            seen.append(step)

    def due(trainer):
        seen.append(trainer.totals.attempted)

    line = Heard(verbose=False, callbacks=[Action(due, every_steps=2)])
    line.train_on_batch(slopes(1.0))
    line.optimizer.learning_rate = 10.0
    line.train_on_batch(slopes(1.0))
    assert seen == [1, 2, 2]
    assert line.weight == 1 - 1 - 10


def test_a_stuck_run_raises_at_its_step():
    """The step that makes a run stuck raises the error of `train`, and the next call may go on."""
    line = overflowing(skips=Skips(max_consecutive=2), verbose=False)
    line.train_on_batch(STEEP)
    with pytest.raises(TrainingStuckError):
        line.train_on_batch(STEEP)
    line.train_on_batch(STEEP)
    assert line.totals.attempted == 3
    assert line.totals.skipped == 3


@pytest.mark.thorough
def test_skipped_batches_are_recorded(tmp_path):
    """The flight recorder keeps a skipped batch, whose replay has the same verdict."""
    line = overflowing(model_dir=tmp_path, skips=Skips(max_records=1), verbose=False)
    line.train_on_batch(STEEP)
    [record] = (tmp_path / "overflows").iterdir()
    replay = overflowing(verbose=False).replay(record)
    assert replay.same
    assert replay.recorded != "applied"


def test_what_waits_for_an_epoch_is_refused():
    """A hook that would never be called is an error before the first step."""

    class Waiting(Linear):
        def on_epoch_end(self, epoch):
            """Never called."""

    with pytest.raises(ValueError, match="`train_on_batch`"):
        Waiting(verbose=False).train_on_batch(slopes(1.0))


@pytest.mark.slow
def test_what_nothing_was_counted_for_is_no_number():
    """Skipped steps have no metrics; a batch without weight is applied, with a loss of 0."""
    trainer = network(precision="mixed_float16", loss_scale="fixed:loss_scale=2^24")
    skipped = trainer.train_on_batch(BATCHES[2])
    assert np.isnan(skipped["mae"])
    trainer = network()
    weightless = trainer.train_on_batch((*BATCHES[0], np.zeros(4, np.float32)))
    assert weightless["loss"] == 0.0
    assert np.isfinite(trainer.train_on_batch(BATCHES[1])["mae"])


class Halved(Linear):
    """Returns half of each loss as aux."""

    def compute_loss(self, batch, training):
        """As in `Linear`."""
        losses = super().compute_loss(batch, training)
        return losses, {"half": losses / 2}


DIVIDED = [
    {"jit_compile": False},
    {"jit_compile": False, "replicas": 2, "num_microbatches": 2},
    {"jit_compile": "step", "skips": Skips(on_overflow="retry")},
    {"jit_compile": "step"},
    {"jit_compile": True, "num_microbatches": 2},
]


@pytest.mark.parametrize(
    "settings",
    [DIVIDED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DIVIDED[1:])],
)
def test_losses_and_aux_of_this_batch(settings, mirrored):
    """`return_aux` returns the rows of the batch as the step computed them, also if it is skipped,
    for any number of examples; the step has the same bits.
    """
    settings = {"precision": "mixed_float16", "verbose": False, **settings}
    strategy = mirrored(settings.pop("replicas", 1))
    one, other = (Halved(strategy=strategy, **settings) for _ in range(2))
    weight = 1.0
    for steps in ([0.5, 2.0], [1e30, 1.0, 0.25, 2.0], [4.0, 1.0]):
        other.train_on_batch(slopes(*steps))
        found = one.train_on_batch(slopes(*steps), return_aux=True)
        assert found.applied == (max(steps) < 1e30)
        np.testing.assert_allclose(found.losses, weight * np.float32(steps), rtol=2**-10)
        assert found.aux["half"].tolist() == (found.losses / 2).tolist()
        assert found.values.keys() == {"loss"}
        weight = one.weight
        assert weight == other.weight
    assert one.totals.skipped == 1


@pytest.mark.thorough
def test_losses_by_optimizer():
    """Optimizers that alternate return the losses of each; `loss_fn` returns the outputs."""

    class Two(Trainer):
        def build_model(self):
            inputs = keras.Input([1])
            parts = {name: keras.layers.Dense(1, use_bias=False) for name in ("critic", "actor")}
            made = keras.Model(inputs, [part(inputs) for part in parts.values()])
            made.critic, made.actor = parts.values()
            return made

        def build_optimizer(self):
            return {"critic": keras.optimizers.SGD(0.1), "actor": keras.optimizers.SGD(0.1)}

        def compute_loss(self, batch, training):
            critic, actor = self.model(batch, training=training)
            return {"critic": critic[:, 0] ** 2, "actor": actor[:, 0] + 7}

    found = Two(verbose=False, updates=Updates(alternate_optimizers=True)).train_on_batch(
        X[:5, :1], return_aux=True
    )
    assert found.losses["critic"].min() >= 0
    assert found.losses["actor"].shape == (5,)
    assert found.aux == ()

    trainer = network()
    found = trainer.train_on_batch(BATCHES[0], return_aux=True)
    np.testing.assert_allclose(found.losses, (found.aux - BATCHES[0][1])[:, 0] ** 2, rtol=1e-5)
    assert trainer.train_on_batch(BATCHES[1]).keys() == {"loss", "mae"}

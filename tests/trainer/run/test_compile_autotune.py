"""`jit_compile="auto"` measures on the first batch, leaves no trace, and keeps to its choice."""

import json

import keras
import pytest
import tensorflow as tf
from helpers import IMAGES, LABELS, SmallImages, adam, all_copies, assert_same_bits, trained_small

from trainer import Trainer, TrainingStuckError
from trainer.data.batches import batches
from trainer.run import compile_autotune as compilation
from trainer.step.xla import COMPILE_MODES


@pytest.fixture
def always(monkeypatch):
    """Lets short runs measure, too, and briefly."""
    monkeypatch.setattr(compilation, "LONG", 1)
    monkeypatch.setattr(compilation, "TURN_SECS", 0.01)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "make", [adam, pytest.param(keras.optimizers.Lion, marks=pytest.mark.slow)]
)
def test_measuring_leaves_no_trace(make):
    """All steps of all ways are put back: the run is one that was told the mode beforehand."""
    measured = trained_small(make=make, jit_compile="auto")
    told = trained_small(make=make, jit_compile=measured.jit_compile)

    assert_same_bits(all_copies(told), all_copies(measured))
    assert measured.totals == told.totals


@pytest.mark.usefixtures("always")
def test_the_fastest_is_taken_and_remembered(tmp_path, capsys):
    """What was measured is in a file and on the screen; the choice is the least of it."""
    trainer = trained_small(jit_compile="auto", model_dir=tmp_path, verbose=True)
    kept = json.loads((tmp_path / "jit_compile.json").read_text())
    millisecs = kept["milliseconds_a_step"]

    assert kept["jit_compile"] == trainer.jit_compile == trainer._parts.plan.jit_compile
    assert set(millisecs) == {COMPILE_MODES[mode] for mode in (False, True, "elementwise")}
    assert COMPILE_MODES[trainer.jit_compile] == min(millisecs, key=millisecs.get)
    assert f"XLA compiles {COMPILE_MODES[trainer.jit_compile]}: " in capsys.readouterr().out


class Counting(SmallImages):
    """Counts how often its loss is traced, and how often it had been when the run began."""

    traced = traced_before = 0

    def compute_loss(self, batch, training):
        """The loss."""
        self.traced += 1
        return super().compute_loss(batch, training)

    def on_train_begin(self):
        """The first step comes next."""
        self.traced_before = self.traced


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_what_was_measured_goes_on(drop_remainder):
    """The run's steps are those that were traced and compiled to be measured: nothing is again."""
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(8, drop_remainder)
    trainer = Counting(optimizer=adam, verbose=False, jit_compile="auto")
    trainer.train(dataset, steps=4)

    assert trainer.traced == trainer.traced_before > 0


@pytest.mark.usefixtures("always")
def test_what_is_slower_has_no_more_turns(monkeypatch):
    """A mode far behind the best after one step is not measured further."""
    turns = []

    def seconds_of(parts, *_):
        turns.append(parts.plan.jit_compile)
        return {False: 1.0, True: 2.0, "elementwise": 1.1}[parts.plan.jit_compile]

    monkeypatch.setattr(compilation, "seconds_of", seconds_of)
    trainer = trained_small(jit_compile="auto")

    assert trainer.jit_compile is False
    assert turns.count(True) == 2  # to compile, and to see
    assert turns.count("elementwise") == turns.count(False) == 2 + compilation.TURNS


@pytest.mark.usefixtures("always")
def test_no_way_is_begun_too_late(monkeypatch):
    """The first has begun; no other does when the time is over."""
    monkeypatch.setattr(compilation, "MOST_SECS", 0.0)
    monkeypatch.setattr(compilation, "seconds_of", lambda *_: 1.0)

    assert compilation.measure(*ready()).millisecs == {False: 1000.0}


def ready(kind=SmallImages):
    """What `measure` is told of a trainer that has taken no step."""
    trainer = kind(optimizer=adam, verbose=False)
    data = batches((IMAGES, LABELS), "train_data", trainer.strategy, global_batch=len(IMAGES))
    trainer._start(data.first)
    return trainer, trainer._parts, data, [False, True], trainer._use


@pytest.mark.usefixtures("always")
def test_a_run_that_is_asked_to_stop_is_not_measured():
    """A loop that ends early says nothing of its speed."""
    told = ready()
    told[1].stop.assign(True)

    assert compilation.measure(*told) is None


@pytest.mark.usefixtures("always")
def test_a_run_that_goes_on_keeps_to_its_choice(tmp_path, monkeypatch):
    """From its checkpoint; and if it was killed before there was one, from the file."""
    trained_small(jit_compile="elementwise", model_dir=tmp_path / "saved")
    beside = tmp_path / "killed" / "jit_compile.json"
    beside.parent.mkdir()
    beside.write_text('{"jit_compile": "elementwise"}')
    monkeypatch.setattr(compilation, "measure", None)  # which nobody calls
    for folder in ("saved", "killed"):
        trainer = trained_small(steps=8, jit_compile="auto", model_dir=tmp_path / folder)

        assert trainer.jit_compile == "elementwise"


class Worded(SmallImages):
    """Has something to do with words, which XLA cannot."""

    def compute_loss(self, batch, training):
        """The loss times the length of a word made of the label, 1."""
        lengths = tf.strings.length(tf.strings.as_string(batch[1]))
        return super().compute_loss(batch, training) * tf.cast(lengths, tf.float32)


@pytest.mark.usefixtures("always")
def test_a_way_that_cannot_be_gone_is_not():
    """XLA refuses strings; the others run."""
    choice = compilation.measure(*ready(Worded))

    assert choice.jit_compile is False
    assert list(choice.millisecs) == [False]


def test_a_short_run_is_not_measured(tmp_path):
    """It would not win back what measuring costs."""
    trainer = trained_small(jit_compile="auto", model_dir=tmp_path)

    assert trainer.jit_compile is False
    assert not (tmp_path / "jit_compile.json").exists()


@pytest.mark.usefixtures("always")
def test_float16_on_a_cpu_is_compiled_unmeasured():
    """TensorFlow's own float16 convolution is a scalar loop: nobody shall sit through it."""
    trainer = trained_small(steps=1, jit_compile="auto", precision="mixed_float16")

    assert trainer.jit_compile is True


@pytest.mark.parametrize(("secs", "compiled"), [(0.015, True), (0.002, False)])
def test_bfloat16_is_compiled_unmeasured_on_a_processor_without_it(monkeypatch, secs, compiled):
    """There it is a scalar loop, too; on others "auto" measures."""
    monkeypatch.setattr(compilation, "gradient_secs", {"bfloat16": secs, "float32": 0.001}.get)
    compilation.computes_in_loops.cache_clear()
    trainer = Trainer(precision="mixed_bfloat16", verbose=False)
    compilation.computes_in_loops.cache_clear()

    assert trainer.jit_compile is compiled


class Endless(SmallImages):
    """No step can be applied."""

    def compute_loss(self, batch, training):
        """Infinite."""
        return super().compute_loss(batch, training) / 0.0


@pytest.mark.usefixtures("always")
def test_a_record_is_run_again_as_its_run_computed(tmp_path, monkeypatch):
    """A record says what was chosen, and a trainer that has chosen nothing yet computes so."""
    times = {False: 2.0, True: 2.0, "elementwise": 1.0}
    monkeypatch.setattr(compilation, "seconds_of", lambda parts, *_: times[parts.plan.jit_compile])
    settings = {"optimizer": adam, "seed": 1, "verbose": False, "max_consecutive_skips": 2}
    trainer = Endless(model_dir=tmp_path, max_overflow_records=1, **settings)
    with pytest.raises(TrainingStuckError):
        trainer.train((IMAGES, LABELS), steps=5, global_batch=8)
    [record] = (tmp_path / "overflows").iterdir()
    again = Endless(**settings)
    replay = again.replay(record)

    assert (
        json.loads((record / "record.json").read_text())["setting"]["jit_compile"] == "elementwise"
    )
    assert again.jit_compile == again._parts.plan.jit_compile == "elementwise"
    assert replay.same

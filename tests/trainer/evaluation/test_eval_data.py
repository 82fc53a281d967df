"""Data to evaluate on: one data set or several by name, whole or its first batches."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, slopes
from tensorflow.python.summary.summary_iterator import summary_iterator

from trainer import Checkpoints
from trainer.evaluation.eval_data import is_named
from trainer.report import write_report
from trainer.report.reading import read_run

# Keras converts its variables in a way that NumPy 2 warns about.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

TRAIN = slopes(*[-1.0] * 4)  # each step adds 1 to the weight, which starts at 1


def stored(*values):
    """A data set of batches of one example each, whose losses are slope times weight."""
    return tf.data.Dataset.from_tensor_slices(slopes(*values)).batch(1)


def test_several_data_sets_have_results_by_name(tmp_path):
    """The results of each data set have its name before them: in hooks, the log, TensorBoard, the
    history, the best models and the report. An evaluation at the start has the results of step 0.
    """
    seen = []

    class Seeing(Linear):
        def on_evaluate_end(self, step, results):
            seen.append((step, results))

    trainer = Seeing(
        model_dir=tmp_path,
        checkpoints=Checkpoints(keep_best=1, best_metric="b/loss", best_is="highest"),
        verbose=False,
    )
    data = {"a": slopes(3.0, 5.0), "b": stored(1.0, 1.0)}
    schedule = {"eval_interval": 2, "evaluate_at_start": True}
    summary = trainer.train(TRAIN, steps=4, global_batch=4, eval_data=data, **schedule)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = [
        (value.tag, event.step, tf.make_ndarray(value.tensor).item())
        for path in (tmp_path / "validation").iterdir()
        for event in summary_iterator(str(path))
        for value in event.summary.value
    ]
    expected = {step: {"a/loss": 4.0 * (1 + step), "b/loss": 1.0 + step} for step in (0, 2, 4)}

    assert dict(seen) == expected
    assert [
        (line["step"], {name: line[name] for name in ("a/loss", "b/loss")})
        for line in lines
        if line["split"] == "validation"
    ] == list(expected.items())
    assert events == [
        (name, step, value) for step in expected for name, value in expected[step].items()
    ]
    assert "b/loss 5.0000 at step 4" in str(summary)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-4"]
    assert trainer.evaluate(data | {"a": stored(3.0, 5.0)}) == expected[4]
    assert read_run(tmp_path).validation["a/loss"].value.tolist() == [4.0, 12.0, 20.0]
    page = pathlib.Path(write_report(tmp_path)).read_text()
    assert "highest validation b/loss" in page
    assert "validation a/loss ends at 20; validation b/loss ends at 5" in page


@pytest.mark.thorough
def test_an_evaluation_at_the_start_is_not_repeated(tmp_path):
    """A resumed run, and a second call of `train`, do not evaluate at their start."""
    arguments = {"global_batch": 4, "eval_data": TRAIN, "evaluate_at_start": True}
    for steps in (2, 3):
        trainer = Linear(model_dir=tmp_path, verbose=False)
        trainer.train(TRAIN, steps=steps, **arguments)
    trainer.train(TRAIN, steps=4, **arguments)

    assert read_run(tmp_path).validation["loss"].step.tolist() == [0, 2, 3, 4]


def test_eval_steps_limits_the_batches():
    """`eval_steps`, and `steps` of `evaluate`, read the first batches of each data set, or all if
    there are fewer. Endless data is then allowed.
    """
    endless = stored(1.0, 2.0, 3.0).repeat()
    seen = []

    class Seeing(Linear):
        def on_evaluate_end(self, step, results):
            seen.append(results)

    trainer = Seeing(verbose=False)
    data = {"endless": endless, "short": stored(7.0)}
    trainer.train(TRAIN, steps=1, global_batch=4, eval_data=data, eval_steps=2)

    assert seen == [{"endless/loss": 2 * 1.5, "short/loss": 2 * 7.0}]
    assert trainer.evaluate(endless, steps=5) == {"loss": 2 * (1 + 2 + 3 + 1 + 2) / 5}
    with pytest.raises(ValueError, match=r"`eval_data\['endless'\]` must end"):
        trainer.train(TRAIN, steps=1, global_batch=4, eval_data=data)


def test_data_that_is_used_up_is_refused():
    """A source that can be read only once would have a mean loss of 0 at its second evaluation."""
    source = iter([slopes(1.0)["x"], slopes(1.0)["x"]])
    once = tf.data.Dataset.from_generator(
        lambda: source, output_signature=tf.TensorSpec([1, 1], tf.float32)
    ).map(lambda x: {"x": x, "slope": x[:, 0]})
    trainer = Linear(verbose=False)
    assert trainer.evaluate(once) == {"loss": 1.0}  # the first batch was read to build the model
    with pytest.raises(ValueError, match="at least one batch"):
        trainer.evaluate(once)
    with pytest.raises(ValueError, match="`data` must hold data for each"):
        trainer._parts.evaluator.evaluate(once, "float32", stoppable=False)


def test_weights_that_are_all_zero_are_refused():
    """A mean of nothing would be 0, the best loss that there is."""
    trainer = Linear(verbose=False)
    trainer.example_weights = lambda batch: 0 * batch["slope"]
    with pytest.raises(ValueError, match="`data`"):
        trainer.evaluate(slopes(1.0, 2.0), global_batch=1)


ROWS, LABELS = np.ones([4, 1], np.float32), np.ones([4], np.float32)


@pytest.mark.parametrize(
    ("data", "like", "named"),
    [
        ((ROWS, LABELS), None, False),
        ({"x": ROWS, "slope": LABELS}, None, False),
        ({"x": ROWS, "slope": LABELS}, {"x": ROWS}, False),
        ({"a": stored(1.0), "b": stored(1.0)}, {"x": ROWS}, True),
        ({"a": (ROWS, LABELS)}, (ROWS, LABELS), True),
        ({"a": (ROWS, LABELS)}, None, True),
        ({"a": (ROWS, LABELS)}, {"a": (ROWS, LABELS)}, False),
        ({"a": {"x": ROWS}}, {"x": ROWS}, True),
        ({"a": {"x": ROWS}}, {"a": {"x": ROWS}}, False),
        ({"a": {"x": ROWS}}, None, False),
        ({}, None, False),
    ],
)
def test_a_dict_of_data_sets_is_told_from_a_batch(data, like, named):
    """A dict is several data sets if its values cannot be the tensors of one batch."""
    assert is_named(data, like) is named

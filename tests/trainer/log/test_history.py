"""The history of a run: its logged and evaluated numbers as arrays and as a pandas table."""

import json
import math
import pickle

import numpy as np
import pytest

from trainer import Totals, TrainSummary
from trainer.log.history import BestResult, History, read_history

LINES = [
    {"step": 0, "split": "run", "settings": {}},
    {"step": 2, "split": "train", "loss": 3.0, "accuracy": None},
    {"step": 3, "split": "validation", "loss": 2.0},
    {"step": 4, "split": "train", "loss": 9.0, "accuracy": 0.5},
    {"step": 4, "split": "recovery", "restored": 3},
    {"step": 4, "split": "train", "loss": 1.0, "accuracy": 0.75},
    {"step": 4, "split": "validation", "loss": 1.5},
]


def summary_of(history):
    """A summary that holds a history as it is now."""
    return TrainSummary(4, 4, Totals(4, {}), 1.0, 0.1, None, snapshot=history.snapshot())


def history_of(tmp_path, step=9):
    """The history in a file with `LINES` and an incomplete line."""
    text = "".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 4'
    (tmp_path / "metrics.jsonl").write_text(text)
    history = History()
    history.read(read_history(tmp_path, step))
    return history


def test_inf_is_nan_as_in_the_file():
    """L12: the history, and the best result, are those of a run that was resumed from the file."""
    history = History()
    history.add("validation", 1, {"loss": math.inf})
    history.add("validation", 2, {"loss": 3.0})
    snapshot = history.snapshot()

    assert np.isnan(snapshot.arrays()["val_loss"]).tolist() == [True, False]
    assert snapshot.best("loss", -1).step == 2


def test_a_history_is_a_dict_of_arrays(tmp_path):
    """Each name has an array as long as its steps; what a line lacks is NaN; a step that was
    repeated after a rollback counts once.
    """
    history = summary_of(history_of(tmp_path)).history

    assert [*history] == ["step", "loss", "accuracy", "val_step", "val_loss"]
    assert {name: column.dtype.name for name, column in history.items()} == {
        name: "int64" if name.endswith("step") else "float64" for name in history
    }
    assert [history[name].tolist() for name in ("step", "loss")] == [[2, 4], [3.0, 1.0]]
    assert [history[name].tolist() for name in ("val_step", "val_loss")] == [[3, 4], [2.0, 1.5]]
    np.testing.assert_array_equal(history["accuracy"], [math.nan, 0.75])


def test_a_summary_keeps_its_history(tmp_path):
    """A summary is not changed by what the run does later, and can be pickled."""
    history = history_of(tmp_path, step=3)
    summary = summary_of(history)
    history.add("train", 5, {"loss": 0.5})
    history.rewind(0)
    history.add("train", 1, {"loss": 7.0})

    assert summary.history["loss"].tolist() == [3.0]
    assert pickle.loads(pickle.dumps(summary)).history["val_loss"].tolist() == [2.0]  # noqa: S301
    assert summary_of(history).history["loss"].tolist() == [7.0]


def test_a_run_without_log_lines_has_an_empty_history():
    """Without steps there are no arrays."""
    assert read_history(None, 9) == []
    assert summary_of(History()).history == {}
    assert TrainSummary(0, 0, Totals(0, {}), 1.0, 0.1, None).history == {}


@pytest.mark.parametrize(("sign", "step"), [(1.0, 4), (-1.0, 2)])
def test_the_best_evaluation(sign, step):
    """The best value wins, and the first of several; NaN never does, and neither does a missing one."""
    history = History()
    rows = {1: {"loss": math.nan}, 2: {"loss": 2.0}, 3: {"other": 0.0}, 4: {"loss": 0.5}}
    assert history.snapshot().best("loss", sign) is None
    for each, results in {**rows, 5: {"loss": 0.5}, 6: {"loss": 2.0}}.items():
        history.add("validation", each, results)
    best = history.snapshot().best("loss", sign)

    assert best == BestResult("loss", rows[step]["loss"], step, rows[step])
    assert str(best) == f"loss {rows[step]['loss']:.4f} at step {step}"


@pytest.mark.extras
def test_a_history_as_a_table(tmp_path):
    """The table has a row for each step with numbers, in order, and is NaN where there are none."""
    pytest.importorskip("pandas", reason="pandas is in the extra pandas")
    table = summary_of(history_of(tmp_path)).to_pandas()

    assert [*table.columns] == ["loss", "accuracy", "val_loss"]
    assert (table.index.name, [*table.index]) == ("step", [2, 3, 4])
    expected = [[3.0, math.nan, math.nan], [math.nan, math.nan, 2.0], [1.0, 0.75, 1.5]]
    np.testing.assert_array_equal(table.to_numpy(), expected)
    assert TrainSummary(0, 0, Totals(0, {}), 1.0, 0.1, None).to_pandas().empty


def test_the_best_on_other_data_does_not_count():
    """Once a run evaluates on other data, its best result is one on that data; also in a program that
    was started again after some steps on it.
    """
    for step in (20, 35):
        history = History()
        history.evaluate_on("first", 0, 20)
        for at, loss in ((10, 1.0), (20, 0.5), (30, 3.0), (35, 2.0)):
            if at <= step:
                history.add("validation", at, {"loss": loss})
        assert history.snapshot().best("loss", 1).step == 20
        before = history.snapshot()
        history.evaluate_on("second", step, 40)
        assert before.best("loss", 1).step == 20
        best = history.snapshot().best("loss", 1)
        assert (best and best.step) == (None if step == 20 else 35)
        history.evaluate_on("second", step, 50)
        history.add("validation", 40, {"loss": 1.5})
        assert history.snapshot().best("loss", 1).step == 40

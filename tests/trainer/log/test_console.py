"""What a person sees of a run, on a terminal and in a log file."""

import contextlib
import csv
import io
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import STEEP, Linear, overflowing
from rich.console import Console

from trainer.log.model_table import build_table, total_size, variable_rows
from trainer.log.writers import append_row

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


class Terminal(io.StringIO):
    """What a program writes to a terminal."""

    def isatty(self):
        """It is one."""
        return True


def run(**arguments):
    """Twelve steps, the first three of which overflow; a line after every four."""
    trainer = overflowing(**arguments)
    trainer.train(STEEP, steps=12, global_batch=4, eval_data=STEEP, eval_interval=6)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 150 columns; a test puts it in the place of standard output."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    return Terminal()


def plain(text):
    """The text without what moves the cursor and colours; a line that is drawn anew is there anew."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def test_a_terminal_shows_a_bar(terminal):
    """Step, percent and the time that is left, and below them what the last log line would have said;
    evaluations stay above it; the cursor comes back.
    """
    with contextlib.redirect_stdout(terminal):
        run()
    text = plain(terminal.getvalue())

    assert re.search(r"step 12/12 \S+ 100% \d:\d\d:\d\d left", text)
    assert "loss -55.5000  loss_scale 2^14  3 skipped (3 backward)" in text
    assert "validation at step 6: loss" in text
    assert "step  4/12" not in text
    assert "at step 12 after 12 steps in" in text.splitlines()[-1]
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_a_terminal_can_show_everything(terminal):
    """Detailed: the bar, the lines too, and every skipped step with its place."""
    with contextlib.redirect_stdout(terminal):
        run(verbose="detailed")
    text = plain(terminal.getvalue())

    assert "step  4/12  33%  loss 3.0000" in text
    assert re.search(
        r"step 2 skipped: backward, in linear\S*weight\S* on replica 0: 1 inf, 0 NaN",
        text,
        re.IGNORECASE,
    ) or re.search(r"step 2 skipped: backward, in \S+ on replica 0: \d+ inf, \d+ NaN", text)


def test_a_run_that_raises_gives_the_terminal_back(terminal):
    """The cursor is shown again, whatever has happened."""

    class Broken(Linear):
        def on_loop_end(self, step):
            raise RuntimeError("broken")

    with contextlib.redirect_stdout(terminal), pytest.raises(RuntimeError, match="broken"):
        Broken().train({"x": X, "slope": X[:, 0]}, steps=4, global_batch=4)

    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_the_share_of_time_spent_waiting_is_measured(capsys):
    """Data that take a while are most of it; data that are there are next to none."""

    def slowly(x):
        return tf.numpy_function(lambda x: (time.sleep(0.05), x)[1], [x], tf.float32)

    class Working(Linear):
        def compute_loss(self, batch, training):
            work = tf.fill([400, 400], tf.reduce_sum(batch["x"]))  # a few milliseconds of it
            for _ in range(4):
                work = tf.tanh(work @ work)
            return super().compute_loss(batch, training) + 0.0 * work[0, 0]

    def share(dataset):
        trainer = Working(steps_per_loop=4, log_interval=8, data_resume="restart")
        trainer.train(dataset, steps=16)
        return int(re.findall(r"(\d+)% waiting for data", capsys.readouterr().out)[-1])

    ready = tf.data.Dataset.from_tensors({"x": X, "slope": X[:, 0]}).repeat()
    slow = ready.map(lambda batch: {**batch, "x": tf.ensure_shape(slowly(batch["x"]), [8, 1])})

    assert share(slow) > 60
    assert share(ready) < 40


def test_a_model_is_shown_by_layer_or_by_variable():
    """Its shapes, dtypes, parameters and bytes, with the precision of each layer; long ones are cut,
    and what is left out is counted.
    """

    def shown(rows, **arguments):
        console = Console(width=120, file=io.StringIO())
        console.print(build_table(rows, **arguments))
        return [line.split() for line in console.file.getvalue().splitlines()]

    keras.config.set_dtype_policy("mixed_float16")
    try:
        dense = [keras.layers.Dense(2, name=f"dense{place}") for place in range(33)]
        wide = keras.layers.Dense(4, dtype="float32", name="wide")
        dropout = keras.layers.Dropout(0.5, name="dropout")
        model = keras.Sequential([keras.Input([2]), *dense, dropout, wide])
    finally:
        keras.config.set_dtype_policy("float32")
    rows = variable_rows(model)
    layers = shown(rows, detailed=False)
    variables = shown(rows, detailed=True)

    assert total_size(rows) == (33 * 6 + 12, 4 * (33 * 6 + 12))
    assert layers[1] == ["dense0", "Dense", "float32", "float16", "6", "24", "B"]
    assert layers[-1] == ["...", "4", "more", "30", "120", "B"]
    assert len(layers) == 1 + 30 + 1
    assert variables[-2] == [
        "sequential/wide/kernel",
        "2",
        "x",
        "4",
        "float32",
        "float32",
        "8",
        "32",
        "B",
    ] or (variables[-2][1:] == ["2", "x", "4", "float32", "float32", "8", "32", "B"])
    assert len(variables) == 1 + 2 * 34


def test_numbers_for_a_spreadsheet(tmp_path):
    """train.csv and validation.csv hold what metrics.jsonl does; a metric that comes later is a column
    whose cells before are empty.
    """
    run(model_dir=tmp_path, verbose=False)
    [*rows] = csv.DictReader((tmp_path / "train.csv").read_text().splitlines())
    [*checks] = csv.DictReader((tmp_path / "validation.csv").read_text().splitlines())

    assert [row["step"] for row in rows] == ["4", "8", "12"]
    assert [float(row["loss"]) for row in rows] == [3.0, -19.5, -55.5]
    assert [row["step"] for row in checks] == ["6", "12"]

    append_row(tmp_path / "train.csv", {"step": 16, "loss": 1.0, "accuracy": 0.5})
    [*more] = csv.DictReader((tmp_path / "train.csv").read_text().splitlines())
    assert [row["accuracy"] for row in more] == ["", "", "", "0.5"]
    assert more[0]["loss"] == "3.0"
    assert more[-1]["loss_scale"] == ""

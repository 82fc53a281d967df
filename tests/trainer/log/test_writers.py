"""The log files: the same numbers in each, and each step exactly once."""

import json
import math

import pytest
import tensorflow as tf
from helpers import STEEP, overflowing

from trainer.log.writers import RunWriters


def train(folder):
    """Twelve steps, the first three of which overflow; a log line after every four steps, and an
    evaluation after every six.
    """
    trainer = overflowing(model_dir=folder, verbose=False)
    trainer.train(STEEP, steps=12, global_batch=4, eval_data=STEEP, eval_interval=6)


def json_lines(folder, split):
    """The lines of one split of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def curves_of(folder):
    """The numbers in a folder of TensorBoard's event files, by name and step."""
    [events] = folder.glob("events.*")
    curves = {}
    for record in tf.data.TFRecordDataset(str(events)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            curves.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    return curves


def test_all_files_hold_the_same_numbers(tmp_path):
    """metrics.jsonl and TensorBoard have the same numbers, under the same names and steps."""
    train(tmp_path)
    lines = json_lines(tmp_path, "train")
    curves = curves_of(tmp_path / "train")
    curves = {name: curve for name, curve in curves.items() if not name.startswith("skips/")}

    assert [line["step"] for line in lines] == [4, 8, 12]
    assert [line["skipped"] for line in lines] == [3, 3, 3]
    assert [line["applied"] for line in lines] == [1, 5, 9]
    assert [line["loss"] for line in lines] == [3.0, -19.5, -55.5]
    for name, curve in curves.items():
        assert curve == {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines}
    assert set(lines[0]) - set(curves) == {"step", "split"}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """JSON has no NaN, so it is null."""
    RunWriters(tmp_path).write_scalars("train", 1, {"loss": math.nan, "scale": 2.0})
    [line] = json_lines(tmp_path, "train")

    assert line == {"step": 1, "split": "train", "loss": None, "scale": 2.0}


def write_steps(folder, steps):
    """Writers that have written one number for each step."""
    writers = RunWriters(folder)
    for step in steps:
        writers.write_scalars("train", step, {"loss": 1.0 / step})
    return writers


def test_rewinding_removes_later_steps(tmp_path):
    """After a rewind and the same steps again, the files are as if the run had never stopped."""
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "resumed", range(1, 7))
    kept = RunWriters(tmp_path / "resumed").rewind(4)
    write_steps(tmp_path / "resumed", range(5, 9))

    assert [line["step"] for line in kept] == [1, 2, 3, 4]
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "resumed"))
    assert whole.read_text() == resumed.read_text()


def test_rewinding_removes_incomplete_lines(tmp_path):
    """Lines that a killed process left incomplete are removed, also if another one went on."""
    writers = write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "spl')
    writers.write_line({"step": 1, "split": "end"})
    writers.rewind(9)

    assert [line["step"] for line in json_lines(tmp_path, "train")] == [1]
    assert json_lines(tmp_path, "end") == []


def test_an_earlier_log_is_set_aside(tmp_path):
    """A run that begins anew in a folder keeps the log of the one before under other names, and its
    best models, which would compete with those of the new run.
    """
    log = tmp_path / "metrics.jsonl"
    write_steps(tmp_path, [1, 2])
    (tmp_path / "best" / "step-9").mkdir(parents=True)
    before, writers = log.read_text(), RunWriters(tmp_path)

    assert writers.set_aside() == ["previous-metrics.jsonl", "previous-best"]
    assert writers.set_aside() == []
    assert (tmp_path / "previous-best" / "step-9").is_dir()
    assert (tmp_path / "previous-metrics.jsonl").read_text() == before
    write_steps(tmp_path, [7])
    assert RunWriters(tmp_path).set_aside() == ["previous-2-metrics.jsonl"]
    assert (tmp_path / "previous-metrics.jsonl").read_text() == before


@pytest.mark.parametrize("odd", ["[1, 2]", "", '{"step": "x", "split": "train"}', "\xbe\0"])
def test_damaged_lines_are_kept_aside_and_told(tmp_path, caplog, odd):
    """They end no run; they are moved beside the log, and the rest stays."""
    writers = write_steps(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(f"{odd}\n")

    assert [line["step"] for line in writers.rewind(2)] == [1, 2]
    assert len((tmp_path / "damaged-metrics.jsonl").read_text().splitlines()) == 1
    assert len(caplog.messages) == 1
    writers.rewind(2)
    assert len(caplog.messages) == 1


def test_rewinding_keeps_recoveries(tmp_path):
    """The line about a rollback stays, although its step is later than the one gone back to. A
    rewind that changes nothing writes nothing.
    """
    writers = write_steps(tmp_path, [1, 2])
    writers.write_line({"step": 9, "split": "recovery", "restored": 4})
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    assert [line["split"] for line in writers.rewind(4)] == ["train", "train", "recovery"]
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before

    writers.write_line({"step": 9, "split": "skip"})
    assert len(writers.rewind(4)) == 3

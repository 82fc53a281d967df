"""The listeners that every run has: when they are called, and in what order."""

import json

import pytest
from helpers import Linear, slopes

from trainer import Action, Checkpoints
from trainer.run.listeners import Periodic


def test_a_period_ends_at_its_multiples_and_at_the_target():
    """It is counted from where it starts; without a period, only the target counts."""
    periodic, at_the_end = Periodic(10, 25, lambda: 2), Periodic(None, 25)

    assert [periodic.next_stop(step) for step in (0, 2, 11, 12, 22)] == [2, 12, 12, 22, 25]
    assert at_the_end.next_stop(3) == 25
    assert [periodic.is_due(before, before + 3) for before in (2, 8, 9, 22)] == [
        False,
        False,
        True,
        True,
    ]


def test_evaluations_and_checkpoints_happen_when_due(tmp_path):
    """Loops end at every checkpoint and evaluation; both also happen at the end, and none twice."""
    trainer = Linear(
        model_dir=tmp_path, steps_per_loop=4, checkpoints=Checkpoints(interval=6), verbose=False
    )
    trainer.train(
        slopes(1.0, 2.0), steps=15, global_batch=2, eval_data=slopes(1.0, 2.0), eval_interval=5
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines if line["split"] == "validation"] == [5, 10, 15]
    saved = {path.name for path in tmp_path.glob("ckpt-*")}
    assert saved == {"ckpt-6", "ckpt-12", "ckpt-15"}


@pytest.mark.thorough
def test_log_lines_are_on_time(tmp_path):
    """A log line is written at each multiple of its interval, however long the loops are."""
    trainer = Linear(model_dir=tmp_path, steps_per_loop=10, log_interval=5, verbose=False)
    trainer.train(slopes(1.0), steps=17, global_batch=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines if line["split"] == "train"] == [5, 10, 15, 17]


@pytest.mark.thorough
def test_the_order_between_inner_loops(tmp_path):
    """After an inner loop come the log line, the evaluation, the actions, the hook, the checkpoint."""
    seen = []

    def look(what):
        metrics = tmp_path / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        splits = [line["split"] for line in lines if line["step"] == 2 and line["split"] != "scale"]
        seen.append((what, splits, (tmp_path / "ckpt-2").exists()))

    class Looking(Linear):
        def on_loop_end(self, step):
            look("hook")

    actions = [Action(lambda _: look("action"), every_steps=2)]
    settings = {"log_interval": 2, "steps_per_loop": 2, "verbose": False}
    trainer = Looking(model_dir=tmp_path, callbacks=actions, **settings)
    trainer.train(slopes(1.0), steps=2, global_batch=1, eval_data=slopes(1.0))

    assert seen == [(what, ["train", "validation"], False) for what in ("action", "hook")]
    assert (tmp_path / "ckpt-2").exists()

"""Settings of checkpoints that depend on more than one argument."""

import pytest
from helpers import Linear, slopes

from trainer import Checkpoints


@pytest.mark.parametrize(
    ("settings", "names", "refused"),
    [
        ({}, None, None),
        ({"best_metric": "accuracy"}, None, None),
        ({}, ["clean/loss", "noisy/loss"], None),
        ({"keep_best": 1}, ["loss"], None),
        ({"keep_best": 1, "best_metric": "accuracy"}, ["loss", "accuracy"], None),
        ({"keep_best": 2}, None, "eval_data"),
        ({"keep_best": 1, "best_metric": "acuracy"}, ["loss", "accuracy"], "best_metric"),
    ],
)
def test_the_result_that_ranks_models_must_exist(settings, names, refused):
    """It is needed only if there are evaluations; without these, no model can be the best."""
    checkpoints = Checkpoints(**settings)
    if refused is None:
        checkpoints.check_results(names)
        return
    with pytest.raises(ValueError, match=f"`{refused}`"):
        checkpoints.check_results(names)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        # Each letter would be an expression, and match the name of most weights.
        ("init_from_skip", {"init_from": "runs/old", "init_from_skip": "head/"}),
        ("init_from_skip", {"init_from_skip": ["head/"]}),
        ("best_is", {"best_is": "lower"}),
    ],
)
def test_values_that_would_mean_something_else_are_refused(name, arguments):
    """The error names the field."""
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        Checkpoints(**arguments)


@pytest.mark.thorough
def test_a_log_without_checkpoints(tmp_path):
    """The folder holds the log and no checkpoint; the same command begins anew, and a folder with
    checkpoints is refused.
    """
    settings = {"model_dir": tmp_path, "log_interval": 1, "verbose": False}
    for _ in range(2):
        trainer = Linear(checkpoints=Checkpoints(enabled=False), **settings)
        summary = trainer.train(slopes(1.0, 2.0), steps=2, global_batch=1)
        assert (summary.steps_run, summary.checkpoint) == (2, None)
        assert [path.name for path in tmp_path.glob("ckpt*")] == []
        assert (tmp_path / "metrics.jsonl").read_text().count('"split": "train"') == 2

    Linear(**settings).train(slopes(1.0, 2.0), steps=1, global_batch=1)
    trainer = Linear(checkpoints=Checkpoints(enabled=False), **settings)
    with pytest.raises(ValueError, match="`enabled`"):
        trainer.train(slopes(1.0), steps=2, global_batch=1)

"""Settings of checkpoints that depend on more than one argument."""

import pytest
from helpers import Linear, slopes

from trainer import Checkpoints


@pytest.mark.parametrize(
    ("checkpoints", "names"),
    [
        (Checkpoints(), None),
        (Checkpoints(best_metric="accuracy"), None),
        (Checkpoints(), ["clean/loss", "noisy/loss"]),
        (Checkpoints(keep_best=1), ["loss"]),
        (Checkpoints(keep_best=1, best_metric="accuracy"), ["loss", "accuracy"]),
    ],
)
def test_results_are_accepted(checkpoints, names):
    """The result that ranks the models is needed only if there are evaluations."""
    checkpoints.check_results(names)


def test_a_metric_without_evaluations_is_named(caplog):
    """It ranks nothing."""
    Checkpoints().check_results(None)
    assert caplog.messages == []
    Checkpoints(best_metric="accuracy").check_results(None)
    assert len(caplog.messages) == 1


def test_keeping_the_best_models_needs_evaluations():
    """Without evaluations no model can be the best."""
    with pytest.raises(ValueError, match="`eval_data`"):
        Checkpoints(keep_best=2).check_results(None)


def test_the_result_that_ranks_models_must_exist():
    """The error lists the results that there are."""
    with pytest.raises(ValueError, match="`best_metric` must be one of loss, accuracy"):
        Checkpoints(keep_best=1, best_metric="acuracy").check_results(["loss", "accuracy"])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("allow_changes", {"allow_changes": "seed"}),
        ("allow_changes", {"allow_changes": ["weights"]}),
        # Each letter would be an expression, and match the name of most weights.
        ("init_from_skip", {"init_from": "runs/old", "init_from_skip": "head/"}),
        ("init_from_skip", {"init_from_skip": ["head/"]}),
        ("interval", {"enabled": False, "interval": 10}),
        ("interval_secs", {"enabled": False, "interval_secs": 10}),
        ("interval_secs", {"interval_secs": -60}),
        ("best_is", {"best_is": "lower"}),
    ],
)
def test_values_that_would_mean_something_else_are_refused(name, arguments):
    """The error names the field."""
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        Checkpoints(**arguments)


@pytest.mark.parametrize("several", [list, tuple, set])
def test_allowed_changes_may_be_any_collection(several):
    """Flags pass a list, and scripts may pass a set."""
    assert Checkpoints(allow_changes=several(["seed", "data"])).max_to_keep == 5


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
        assert (tmp_path / "train.csv").read_text().count("\n") == 3

    Linear(**settings).train(slopes(1.0, 2.0), steps=1, global_batch=1)
    trainer = Linear(checkpoints=Checkpoints(enabled=False), **settings)
    with pytest.raises(ValueError, match="`enabled`"):
        trainer.train(slopes(1.0), steps=2, global_batch=1)

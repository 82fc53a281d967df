"""Settings of checkpoints that depend on more than one argument."""

import pytest
from helpers import Linear, slopes

from trainer.config.checkpoint_config import CheckpointConfig


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (CheckpointConfig(), None),
        (CheckpointConfig(best_metric="accuracy"), None),
        (CheckpointConfig(), ["clean/loss", "noisy/loss"]),
        (CheckpointConfig(keep_best=1), ["loss"]),
        (CheckpointConfig(keep_best=1, best_metric="accuracy"), ["loss", "accuracy"]),
    ],
)
def test_results_are_accepted(config, names):
    """The result that ranks the models is needed only if there are evaluations."""
    config.check_results(names)


def test_a_metric_without_evaluations_is_named(caplog):
    """It ranks nothing."""
    CheckpointConfig().check_results(None)
    assert caplog.messages == []
    CheckpointConfig(best_metric="accuracy").check_results(None)
    assert caplog.messages == [
        "best_metric='accuracy' has no effect without eval_data, whose results it compares."
    ]


def test_keeping_the_best_models_needs_evaluations():
    """Without evaluations no model can be the best."""
    with pytest.raises(ValueError, match="`eval_data` must be given") as error:
        CheckpointConfig(keep_best=2).check_results(None)

    assert str(error.value) == (
        "`eval_data` must be given to keep the best models; got None with keep_best=2. Evaluations "
        "say which models are best. Pass eval_data=, or leave out keep_best."
    )


def test_the_result_that_ranks_models_must_exist():
    """The error lists the results that there are."""
    config = CheckpointConfig(keep_best=1, best_metric="acuracy")
    with pytest.raises(ValueError, match="`best_metric` must be a result") as error:
        config.check_results(["loss", "accuracy"])

    assert str(error.value) == (
        "`best_metric` must be a result of the evaluation; got 'acuracy', but the results are "
        "loss, accuracy. This result decides which models are best. Choose one of these results."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"best_metric": 3},
            "`best_metric` must be the name of an evaluation result; got 3. The result decides "
            'which models are best. Pass "loss", or the name of a metric.',
        ),
        (
            {"allow_changes": 3},
            "`allow_changes` must be a sequence of names; got 3. Each name is a setting that may "
            'differ from the checkpoint. Pass ("seed",), for example.',
        ),
    ],
)
def test_values_of_another_type_are_refused(arguments, message):
    """The error says what the value is used for."""
    with pytest.raises(TypeError) as error:
        CheckpointConfig(**arguments)

    assert str(error.value) == message


@pytest.mark.parametrize("several", [list, tuple, set])
def test_allowed_changes_may_be_any_collection(several):
    """Flags pass a list, and scripts may pass a set."""
    assert CheckpointConfig(allow_changes=several(["seed", "data"])).max_to_keep == 5


@pytest.mark.thorough
def test_a_log_without_checkpoints(tmp_path):
    """The folder holds the log and no checkpoint; the same command begins anew, and a folder with
    checkpoints is refused.
    """
    settings = {"model_dir": tmp_path, "log_interval": 1, "verbose": False}
    for _ in range(2):
        trainer = Linear(enable_checkpointing=False, **settings)
        summary = trainer.train(slopes(1.0, 2.0), steps=2, global_batch=1)
        assert (summary.steps_run, summary.checkpoint) == (2, None)
        assert [path.name for path in tmp_path.glob("ckpt*")] == []
        assert (tmp_path / "train.csv").read_text().count("\n") == 3

    Linear(**settings).train(slopes(1.0, 2.0), steps=1, global_batch=1)
    with pytest.raises(ValueError, match="enable_checkpointing") as error:
        Linear(enable_checkpointing=False, **settings).train(slopes(1.0), steps=2, global_batch=1)
    assert str(error.value) == (
        "`enable_checkpointing` must be True in a model_dir that holds checkpoints; got False and "
        f"'{tmp_path / 'ckpt-1'}'. The run would begin anew beside them. Leave out "
        "enable_checkpointing=False, or choose another model_dir."
    )

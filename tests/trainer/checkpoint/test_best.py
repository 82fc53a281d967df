"""The best models of a run by an evaluation result."""

import json
import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import Checkpoints, Trainer, Updates
from trainer.checkpoint import folder
from trainer.checkpoint.best import Best

NAN = math.nan


def export(path):
    """Writes a file in place of a model."""
    (path / "model").write_text(path.name)


def consider(model_dir, losses, keep=2, which="lowest"):
    """Considers evaluations at steps 1, 2, 3 and so on; returns those exported, and those kept."""
    kept = []
    for step, loss in enumerate(losses, start=1):
        # A new object each time, as in a resumed run.
        best = Best(model_dir, keep, "loss", which)
        if best.consider(step, {"loss": loss, "other": 0.0}, export):
            kept.append(step)
    return kept, list(folder.committed(model_dir / "best", "step"))


@pytest.mark.parametrize(
    ("losses", "which", "kept", "stay"),
    [
        ([3.0, 2.0, 4.0, 1.0], "lowest", [1, 2, 4], [2, 4]),
        ([3.0, 2.0, 4.0, 1.0], "highest", [1, 2, 3], [1, 3]),
        # Of equal results, the first are kept.
        ([1.0, 1.0, 1.0, 1.0], "lowest", [1, 2], [1, 2]),
        ([2.0, 1.0, 2.0, 1.0, 1.0], "lowest", [1, 2, 4], [2, 4]),
        ([NAN, 2.0, NAN, 1.0, 3.0], "lowest", [2, 4], [2, 4]),
        ([NAN, -2.0, math.inf, 1.0], "highest", [2, 3, 4], [3, 4]),
        ([math.inf, 5.0], "lowest", [2], [2]),
        ([-math.inf, 5.0, 7.0], "lowest", [1, 2], [1, 2]),
        ([-0.0, 0.0, 0.0], "lowest", [1, 2], [1, 2]),
    ],
)
def test_the_best_stay(tmp_path, losses, which, kept, stay):
    """The lowest or highest results are kept, and NaN never is. Resuming changes nothing, since the
    folders are the only record.
    """
    assert consider(tmp_path, losses, which=which) == (kept, stay)
    for step in stay:
        path = tmp_path / "best" / f"step-{step}"
        facts = folder.read_manifest(path)
        assert (facts["step"], facts["results"]) == (step, {"loss": losses[step - 1], "other": 0.0})
        assert (path / "model").exists()


@given(
    losses=st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, NAN]), max_size=12),
    saved_every=st.integers(1, 4),
    rolled_back_at=st.sets(st.integers(1, 12)),
    max_to_keep=st.integers(1, 3),
    keep=st.integers(1, 3),
)
def test_rollbacks_leave_the_best_of_what_is_left_of_the_run(
    tmp_path_factory, losses, saved_every, rolled_back_at, max_to_keep, keep
):
    """For any results, checkpoints and rollbacks to the newest or the oldest of them, the best
    models are the first of the sorted results of the steps that were not discarded, and no more
    models are kept than may be needed.
    """
    model_dir = tmp_path_factory.mktemp("run")
    step, left, saved = 0, {}, []
    for number, loss in enumerate(losses, 1):
        step += 1
        left[step] = loss
        Best(model_dir, keep, "loss", "lowest").consider(step, {"loss": loss}, export, saved)
        if step % saved_every == 0:
            saved = [*saved, step][-max_to_keep:]
        if number in rolled_back_at and saved:
            step = saved[0 if number % 2 else -1]
            saved = [one for one in saved if one <= step]
            left = {at: value for at, value in left.items() if at <= step}
            Best(model_dir, keep, "loss", "lowest").roll_back(step, saved)
        ranked = sorted((value, at) for at, value in left.items() if not math.isnan(value))

        stay = list(folder.committed(model_dir / "best", "step"))
        assert stay == sorted(at for _, at in ranked[:keep])
        outranked = folder.committed(model_dir / "best", "outranked")
        assert len(outranked) <= keep * max_to_keep


def test_an_interrupted_export_leaves_the_best_models(tmp_path):
    """No model is removed before the new one is in place, and no partial one is ever listed."""
    consider(tmp_path, [3.0, 2.0])

    def dying(path):
        export(path)
        raise KeyboardInterrupt

    best = Best(tmp_path, 2, "loss", "lowest")
    with pytest.raises(KeyboardInterrupt):
        best.consider(3, {"loss": 1.0}, dying)
    assert list(folder.committed(tmp_path / "best", "step")) == [1, 2]
    assert list(best.ranked().values()) == [2.0, 3.0]
    best.consider(4, {"loss": 1.5}, export)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["step-2", "step-4"]


def test_a_repeated_evaluation_replaces_the_earlier_one(tmp_path):
    """A resumed run may evaluate the same step again; the step does not compete with itself."""
    consider(tmp_path, [3.0, 2.0])
    best = Best(tmp_path, 2, "loss", "lowest")
    assert best.consider(2, {"loss": 2.0}, export)
    assert best.consider(1, {"loss": 2.5}, export)

    assert list(best.ranked().items()) == [
        (tmp_path / "best" / "step-2", 2.0),
        (tmp_path / "best" / "step-1", 2.5),
    ]
    only = Best(tmp_path, 1, "loss", "lowest")
    assert only.consider(2, {"loss": 2.0}, export)
    assert list(only.ranked()) == [tmp_path / "best" / "step-2"]


def test_a_damaged_model_is_replaced_first(tmp_path):
    """A damaged model ranks last, and so does one whose evaluation lacks the metric."""
    consider(tmp_path, [1.0, 2.0])
    (tmp_path / "best" / "step-1" / "model").write_text("x")
    best = Best(tmp_path, 2, "loss", "lowest")
    assert list(best.ranked().values()) == [2.0, math.inf]
    assert best.consider(3, {"loss": 9.0}, export)
    assert list(folder.committed(tmp_path / "best", "step")) == [2, 3]

    by_other = Best(tmp_path, 2, "new", "lowest")
    assert by_other.consider(4, {"loss": 1.0, "new": 5.0}, export)
    assert len(folder.committed(tmp_path / "best", "step")) == 2


# Within a run.

# Keras converts its variables in a way that NumPy 2 warns about.
KERAS_EXPORTS = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)

X = np.random.default_rng(3).normal(size=[12, 2]).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0]])


class Learning(Trainer):
    """Learns a line behind BatchNorm, with a moving average of the weights."""

    def __init__(self, **arguments):
        """Keeps the two best models."""
        super().__init__(
            loss_fn="mse",
            metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
            optimizer=lambda: keras.optimizers.SGD(0.1),
            updates=Updates(ema_momentum=0.5),
            seed=1,
            **{"verbose": False, "checkpoints": Checkpoints(keep_best=2)} | arguments,
        )

    def build_model(self):
        """BatchNorm and a dense layer."""
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input([2]), *layers])


def results_of(model_dir):
    """The evaluation results in the log, by step."""
    lines = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {"loss": line["loss"], "error": line["error"]}
        for line in lines
        if line["split"] == "validation"
    }


@pytest.mark.thorough
@KERAS_EXPORTS
def test_a_best_model_is_the_one_that_was_evaluated(tmp_path, capsys):
    """A best model has the averaged weights and the statistics of its step: evaluating the file
    gives the same results bit for bit. The run itself continues from its own weights.
    """
    data = {"steps": 8, "global_batch": 4, "eval_data": (X, Y), "eval_interval": 1}
    trainer = Learning(
        model_dir=tmp_path, checkpoints=Checkpoints(keep_best=2, best_metric="error"), verbose=True
    )
    trainer.train((X, Y), **data)
    out = capsys.readouterr().out
    plain = Learning(checkpoints=Checkpoints(keep_best=0))
    plain.train((X, Y), **data)

    found = results_of(tmp_path)
    best = sorted(found, key=lambda step: found[step]["error"])[:2]
    kept = folder.committed(tmp_path / "best", "step")
    assert list(kept) == sorted(best)
    assert out.count(f"kept in {tmp_path / 'best'}") >= 2
    for step, path in kept.items():
        facts = folder.read_manifest(path)
        assert facts["results"] == found[step]
        assert set(facts["files"]) == {"model.keras"}
        again = Trainer(
            model=lambda path=path: keras.saving.load_model(path / "model.keras"),
            optimizer="sgd",
            loss_fn="mse",
            metrics=lambda: {"error": keras.metrics.MeanAbsoluteError()},
            verbose=False,
        )
        assert again.evaluate((X, Y), global_batch=4) == found[step]
    for ours, theirs in zip(trainer.model.weights, plain.model.weights, strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()

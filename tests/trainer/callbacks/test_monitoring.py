"""What a run checks, records and reports besides its log lines: profiles for TensorBoard."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Monitoring, Trainer

X = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


def test_the_requested_steps_are_profiled(tmp_path, monkeypatch):
    """Inner loops end where the profile starts and ends, and the file is where TensorBoard looks."""
    seen = []
    for name in ("start", "stop"):
        real = getattr(tf.profiler.experimental, name)
        monkeypatch.setattr(
            tf.profiler.experimental,
            name,
            lambda *where, real=real, name=name: (
                seen.append((name, trainer.totals.attempted)),
                real(*where),
            ),
        )
    trainer = Trainer(
        model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss_fn="mse",
        model_dir=tmp_path,
        monitoring=Monitoring(profile_steps=(7, 9)),
        steps_per_loop=5,
        verbose=False,
    )
    trainer.train((X, X), steps=12, global_batch=8)

    assert seen == [("start", 6), ("stop", 9)]
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.thorough
def test_a_profile_ends_with_its_run(tmp_path, capsys):
    """If the last step to profile is not reached, the profile is that of the steps before; the next one
    can begin.
    """
    for name in ("first", "second"):
        trainer = Trainer(
            model=lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]),
            optimizer="sgd",
            loss_fn="mse",
            model_dir=tmp_path / name,
            monitoring=Monitoring(profile_steps=(3, 100)),
        )
        trainer.train((X, X), steps=5, global_batch=8)
        assert list((tmp_path / name).glob("plugins/profile/*/*.xplane.pb"))
    assert capsys.readouterr().out.count("profiled, for TensorBoard") == 2


@pytest.mark.parametrize("steps", [(9, 3), (0, 3)])
def test_steps_that_cannot_be_profiled_are_refused(steps):
    """Nothing would be profiled, without a word."""
    with pytest.raises(ValueError, match=r"^`profile_steps` must "):
        Monitoring(profile_steps=steps)

"""Profiles of a range of steps, for TensorBoard."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Monitoring, Trainer
from trainer.callbacks.profiling import Profile

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


def test_the_profiler_runs_for_exactly_its_steps(monkeypatch, tmp_path):
    """It starts before the first step and stops after the last one, once each."""
    calls = []
    profiler = tf.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(profiler, "stop", lambda: calls.append(("stop",)))
    profile = Profile((3, 4), tmp_path, calls.append)
    for step in range(6):
        profile.before(step)
        if profile.is_due(step, step + 1):
            profile.after(step + 1)

    assert [profile.next_stop(step) for step in range(5)] == [2, 2, 4, 4, None]
    assert calls[:2] == [("start", str(tmp_path)), ("stop",)]
    assert len(calls) == 3

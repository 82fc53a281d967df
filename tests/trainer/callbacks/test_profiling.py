"""Profiles of a range of steps, for TensorBoard."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Trainer
from trainer.callbacks.profiling import Profile, check_profile

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
        profile_steps=(7, 9),
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
            profile_steps=(3, 100),
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
    profile = Profile((3, 4), tmp_path)
    stopped = []
    for step in range(6):
        profile.before(step)
        stopped.append(profile.after(step + 1))

    assert profile.ends == (2, 4)
    assert stopped == [False, False, False, True, False, False]
    assert calls == [("start", str(tmp_path)), ("stop",)]


@pytest.mark.parametrize("steps", [(9, 3), (0, 5), (3,), 5, (1.0, 2.0), "12"])
def test_two_steps_in_order_are_required(steps, tmp_path):
    """None profiles nothing; anything but two steps in order is refused."""
    check_profile(None, None)
    check_profile([101, 110], tmp_path)
    with pytest.raises(ValueError, match="`profile_steps`") as error:
        check_profile(steps, tmp_path)

    assert str(error.value) == (
        f"`profile_steps` must be the first and the last step to profile; got {steps!r}. Both must "
        "be at least 1, and the last must not come before the first. Pass (101, 110), for example."
    )


def test_a_profile_needs_a_model_dir():
    """The profile is a file, so there must be a folder for it."""
    with pytest.raises(ValueError, match="`profile_steps`") as error:
        check_profile((3, 9), None)

    assert str(error.value) == (
        "`profile_steps` must be None without `model_dir`; got (3, 9). The profile is written "
        "to that directory. Pass model_dir= as well."
    )

"""`python -m trainer.tune` measures the compile modes and prints the fastest one."""

import time

import pytest
from helpers import Linear, slopes

from trainer import tune


def make(jit_compile):
    """A trainer that sleeps before each inner loop, longest in mode False, and cannot take "step"."""
    if jit_compile == "step":
        raise ValueError("no step\nwith more")
    trainer = Linear(jit_compile=jit_compile, verbose=False)
    trainer.on_loop_end = lambda step: time.sleep(0.05 if jit_compile is False else 0.2)  # noqa: ARG005
    return trainer, {"train_data": slopes(1.0, 2.0), "global_batch": 2}


@pytest.mark.thorough
def test_the_fastest_mode_is_printed(monkeypatch, capsys):
    """Of the modes that are possible; the others are named."""
    monkeypatch.setattr(tune, "COMPILE_MODES", (False, "elementwise", "step"))
    tune.main([f"{__name__}:make", "--steps=2", "--rounds=1"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "'step' is not possible: no step"
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        f"jit_compile={mode!r}" for mode in ("auto", False, "elementwise")
    ]
    assert lines[-1] == "fastest: jit_compile=False"

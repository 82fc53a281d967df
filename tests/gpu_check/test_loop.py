"""The loop around a step that is one program: on a GPU, the host runs ahead of it."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import tensorflow as tf
from gpu_check.placement import CARD, copies_to_host
from helpers import IMAGES, LABELS, SmallImages, adam, assert_close

import strategies
from trainer.data.batches import untuned
from trainer.loop import pending
from trainer.run import build

BATCHES = untuned(tf.data.Dataset.from_tensors((IMAGES, LABELS)).repeat())


@contextlib.contextmanager
def as_if_on_a_gpu():
    """Lets a second logical CPU pass for a GPU; yields a strategy that computes there."""
    strategy = tf.distribute.OneDeviceStrategy(f"/device:{CARD}")
    found = dataclasses.replace(strategies.capabilities(strategy), on_cpu=False)
    with mock.patch.object(strategies, "capabilities", return_value=found):
        yield strategy


def traced_loop(made=SmallImages, **settings):
    """The inner loop as it is traced where there is a GPU, and what lies on the host there."""
    with as_if_on_a_gpu() as strategy:
        settings = {"jit_compile": "step", "strategy": strategy} | settings
        trainer = made(optimizer=adam, verbose=False, **settings)
        trainer._start(next(iter(BATCHES)))
        parts = trainer._parts
        concrete = parts.run_steps.get_concrete_function(iter(BATCHES), tf.constant(1))
    kept = parts.pending
    rows = [] if CARD in kept._device else [kept._rows]
    return concrete, [*rows, kept._waits, kept._waiting, kept._held, kept._uncounted, parts.stop]


def in_each_step(concrete, on_host):
    """What the host waits for in each step of a traced loop."""
    copies = copies_to_host(concrete, on_host)
    return [each for each in copies if each.user.startswith("while/") and not each.conditional]


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_the_host_does_not_wait_for_a_step(precision):
    """L14: nothing that a step computes is needed on the host in every step: neither its report, nor
    whether the run goes on. What is read after some steps is whether the run is halted.
    """
    loop = traced_loop(precision=precision)
    found = copies_to_host(*loop)

    assert in_each_step(*loop) == []
    assert [each.user for each in found if each.conditional] == ["while/cond_1/Identity_1"]


def test_a_loop_that_stops_at_once_is_found(monkeypatch):
    """With a read of what the step has decided, the host waits for each step."""
    monkeypatch.setattr(build, "runs_ahead", lambda *_: False)

    assert in_each_step(*traced_loop())


def test_a_report_on_the_host_is_found(monkeypatch):
    """With the reports in the host's memory, the host waits for each step."""

    def on_host(*of, device):
        del device
        return pending.Pending(*of)

    monkeypatch.setattr(build, "Pending", on_host)

    assert in_each_step(*traced_loop())


def test_a_check_of_the_data_is_found():
    """`check_data=True` stops at a wrong value, so the host waits until a batch has been looked at."""
    assert in_each_step(*traced_loop(check_data=True))


def test_a_loop_on_the_host_takes_steps_on_another_device():
    """What the step reads and writes lies on its device, the loop on the host; the run is as ever."""
    usual = SmallImages(optimizer=adam, seed=1, jit_compile="step", verbose=False)
    usual.train(BATCHES, steps=5)
    with as_if_on_a_gpu() as strategy:
        apart = SmallImages(
            optimizer=adam, seed=1, jit_compile="step", strategy=strategy, verbose=False
        )
        apart.train(BATCHES, steps=5)

    assert apart._parts.plan.runs_ahead
    assert CARD in apart._parts.state.halted.device
    assert_close(usual, apart)

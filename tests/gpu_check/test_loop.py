"""The loop around a step that is one program: what the host reads of each step on a GPU."""

import contextlib
import dataclasses
from unittest import mock

import access
import pytest
import tensorflow as tf
from access import untuned
from gpu_check.placement import CARD, copies_to_host
from helpers import IMAGES, LABELS, SmallImages, adam, assert_close

import strategies
from trainer import Monitoring
from trainer.loop import pending
from trainer.run import build

BATCHES = untuned(tf.data.Dataset.from_tensors((IMAGES, LABELS)).repeat())


def on_card():
    """A strategy that computes on the device that stands for a GPU."""
    return tf.distribute.OneDeviceStrategy(f"/device:{CARD}")


@contextlib.contextmanager
def as_if_on_a_gpu():
    """Lets a second logical CPU pass for a GPU; yields a strategy that computes there."""
    strategy = on_card()
    found = dataclasses.replace(strategies.capabilities(strategy), on_cpu=False)
    with mock.patch.object(strategies, "capabilities", return_value=found):
        yield strategy


def traced_loop(made=SmallImages, **settings):
    """The inner loop as it is traced where there is a GPU, and what lies on the host there."""
    with as_if_on_a_gpu() as strategy:
        settings = {"jit_compile": "step", "strategy": strategy} | settings
        trainer = made(optimizer=adam, verbose=False, **settings)
        access.start(trainer, next(iter(BATCHES)))
        parts = trainer._parts
        concrete = parts.run_steps.get_concrete_function(iter(BATCHES), tf.constant(1))
    kept = parts.pending
    rows = [] if CARD in kept._device else [kept._rows]
    return concrete, [*rows, kept._waits, parts.stop]


# What the host always waits for: whether the run goes on; and whether the loop does, which TensorFlow
# computes on the host and passes through the card.
ALWAYS = ["while/goes_on", "the condition"]


def in_each_step(concrete, on_host):
    """The sources of what the host waits for in each step of a traced loop, its condition included."""
    copies = [each for each in copies_to_host(concrete, on_host) if not each.conditional]
    return [each.source for each in copies if each.user.split("/")[0] == "while"]


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_the_host_reads_one_number_of_a_step(precision):
    """Whether it has halted the run. The report stays on the card."""
    assert in_each_step(*traced_loop(precision=precision)) == ALWAYS


def test_a_report_on_the_host_is_found(monkeypatch):
    """With the reports in the host's memory, the host reads them in each step."""

    def on_host(*of, device):
        del device
        return pending.Pending(*of)

    monkeypatch.setattr(build, "Pending", on_host)

    assert in_each_step(*traced_loop()) == ["while/StatefulPartitionedCall", *ALWAYS]


def test_a_check_of_the_data_is_found():
    """`check_data=True` stops at a wrong value, so the host waits until a batch has been looked at."""
    found = in_each_step(*traced_loop(monitoring=Monitoring(check_data=True)))

    assert {*found} > {*ALWAYS}


@pytest.mark.thorough
def test_a_step_that_is_one_program_runs_on_the_device_of_its_variables():
    """On a device that is not the default one, too: in `train`, and in `train_on_batch`."""
    settings = {"optimizer": adam, "seed": 1, "jit_compile": "step", "verbose": False}
    usual, apart = SmallImages(**settings), SmallImages(**settings, strategy=on_card())
    for trainer in (usual, apart):
        trainer.train(BATCHES, steps=5)
        trainer.train_on_batch((IMAGES, LABELS))

    assert CARD in access.state(apart).halted.device
    assert_close(usual, apart)

"""The `repr` of a trainer says where its run stands; an interrupted trainer can go on."""

import os
import signal

import pytest
from helpers import Linear, slopes

from trainer import Action, Trainer

DATA = slopes(1.0, 1.0)


def interrupt(trainer):
    """Sends what Ctrl-C and a notebook's stop button send."""
    if trainer.totals.attempted == 20:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_trainer_says_where_it_stands_also_after_an_interruption(tmp_path):
    """The line has the step, the precision, the loss scale, the replicas and the folder. A trainer
    that was interrupted goes on at the next call.
    """
    trainer = Linear(
        model_dir=tmp_path, verbose=False, callbacks=[Action(interrupt, every_steps=10)]
    )
    before = repr(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(DATA, steps=50, global_batch=2)
    interrupted = repr(trainer)
    step = trainer.totals.attempted
    trainer.train(DATA, steps=50, global_batch=2)

    end = f"float32, loss_scale 1, 1 replica, model_dir {str(tmp_path)!r}>"
    assert before == f"<Linear: not started, float32, 1 replica, model_dir {str(tmp_path)!r}>"
    assert 20 <= step < 50  # the signal ends the loop that runs when it arrives
    assert interrupted == f"<Linear: at step {step}, {step} applied, 0 skipped, {end}"
    assert repr(trainer) == f"<Linear: at step 50, 50 applied, 0 skipped, {end}"


def test_a_trainer_whose_constructor_failed_has_a_line():
    """A debugger shows an unfinished object without an error of its own."""
    assert repr(Trainer.__new__(Trainer)) == "<Trainer: not started>"

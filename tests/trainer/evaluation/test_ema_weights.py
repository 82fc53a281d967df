"""Moving averages of the weights (EMA) in evaluation and export."""

import threading

import access
import keras
import numpy as np
import pytest
from helpers import Linear, all_copies, assert_same_bits, slopes

from trainer import Action, Updates
from trainer.evaluation.ema_weights import averaged_weights, evaluated_weights


@pytest.fixture(scope="module")
def averaging():
    """A run with weights 0, -1 and -2 after its three updates."""
    trainer = Linear(updates=Updates(ema_momentum=0.5), verbose=False)
    trainer.train(slopes(1.0), steps=3, global_batch=1)
    return trainer


def test_the_weights_are_restored_after_an_exception(averaging):
    """Inside the context the weights are the averages; an exception restores their bits."""
    before = all_copies(averaging)
    seen = []

    def fail():
        with averaged_weights(access.plan(averaging)):
            seen.append(averaging.weight)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert seen == [-1.25]
    assert_same_bits(before, all_copies(averaging))


def test_without_an_update_the_weights_stay():
    """If the only step was skipped, there is no average yet, and the weights are used."""
    trainer = Linear(updates=Updates(ema_momentum=0.5), verbose=False)
    trainer.train(slopes(np.nan), steps=1, global_batch=1)
    with averaged_weights(access.plan(trainer)):
        assert trainer.weight == 1.0


@pytest.mark.parametrize(("averaged", "weight"), [(None, -1.25), (True, -1.25), (False, -2.0)])
def test_the_average_is_the_default(averaging, averaged, weight):
    """None uses the average if the run keeps one."""
    with evaluated_weights(access.plan(averaging), averaged):
        assert averaging.weight == weight


# Raised by Keras when it saves: NumPy 2 expects another signature of its variables.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_average_is_what_is_evaluated_and_exported(mirrored, tmp_path, replicas):
    """`ema_momentum` keeps a moving average of the weights over updates. Evaluation, prediction and
    export use it by default, and the weights have their bits again afterwards.
    """
    trainer = Linear(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        updates=Updates(ema_momentum=0.5),
        verbose=False,
    )
    data = slopes(*[1.0] * replicas)
    trainer.train(data, steps=3, global_batch=replicas)
    weights = [0.0, -1.0, -2.0]
    average = weights[0]
    for weight in weights[1:]:
        average = 0.5 * average + 0.5 * weight
    path = tmp_path / "model.keras"
    trainer.export(path)

    assert trainer.evaluate(data, global_batch=replicas)["loss"] == average
    assert trainer.evaluate(data, global_batch=replicas, averaged=False)["loss"] == -2.0
    assert keras.saving.load_model(path).get_weights()[0].item() == average
    assert trainer.weight == -2.0
    assert (
        trainer.predict(data["x"], global_batch=replicas).ravel().tolist() == [average] * replicas
    )


def test_an_average_that_is_not_kept():
    """Asking for an average that is not kept is an error."""
    trainer = Linear(verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    with pytest.raises(ValueError, match="`averaged`"):
        trainer.evaluate(slopes(1.0), global_batch=1, averaged=True)


def test_two_averages_are_refused():
    """The trainer's and the optimizer's averages exclude each other."""

    class Averaging(Linear):
        def build_optimizer(self):
            return keras.optimizers.SGD(1.0, use_ema=True)

    trainer = Averaging(updates=Updates(ema_momentum=0.9), verbose=False)
    with pytest.raises(ValueError, match="`ema_momentum`"):
        trainer.train(slopes(1.0), steps=1, global_batch=1)


def test_the_average_is_not_used_beside_a_run():
    """Another thread would undo the steps that the run takes meanwhile."""
    refused = []

    def evaluate(trainer):
        with pytest.raises(RuntimeError, match="`averaged` must be False"):
            trainer.evaluate(slopes(1.0), global_batch=1)
        refused.append(True)

    def beside(trainer):
        thread = threading.Thread(target=evaluate, args=[trainer])
        thread.start()
        thread.join()

    trainer = Linear(
        updates=Updates(ema_momentum=0.5), verbose=False, callbacks=[Action(beside, every_steps=1)]
    )
    trainer.train(slopes(1.0), 1, global_batch=1)

    assert refused


@pytest.mark.thorough
def test_a_program_uses_the_average():
    """Inside `trainer.averaged_weights` the model has the average, steps are refused, and `evaluate`
    uses it; afterwards the run goes on as if nothing had been.
    """
    trainer, other = (Linear(updates=Updates(ema_momentum=0.5), verbose=False) for _ in range(2))
    for one in (trainer, other):
        one.train(slopes(1.0), steps=3, global_batch=1)
    calls = [
        lambda: trainer.train(slopes(1.0), steps=4, global_batch=1),
        lambda: trainer.train_on_batch(slopes(1.0)),
        lambda: trainer.restore(slopes(1.0)),
    ]
    with trainer.averaged_weights():
        assert trainer.weight == -1.25
        assert trainer.evaluate(slopes(1.0), global_batch=1)["loss"] == -1.25
        for call in calls:
            with pytest.raises(RuntimeError, match="averaged_weights"):
                call()
    for one in (trainer, other):
        one.train(slopes(1.0), steps=5, global_batch=1)
    assert list(all_copies(trainer).values()) == list(all_copies(other).values())


def test_a_hook_uses_the_average():
    """A sampler in an action sees the average while the run is trained."""
    seen = []

    def sample(trainer):
        with trainer.averaged_weights():
            seen.append(trainer.weight)

    trainer = Linear(
        updates=Updates(ema_momentum=0.5), verbose=False, callbacks=[Action(sample, every_steps=3)]
    )
    trainer.train(slopes(1.0), steps=3, global_batch=1)
    assert (seen, trainer.weight) == ([-1.25], -2.0)


def test_a_program_needs_an_average():
    """Without `ema_momentum` there is no average, and before the first batch no model."""
    with pytest.raises(RuntimeError, match="averaged_weights"), Linear().averaged_weights():
        pass
    trainer = Linear(verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    with pytest.raises(ValueError, match="averaged"), trainer.averaged_weights():
        pass

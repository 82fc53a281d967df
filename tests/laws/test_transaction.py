"""L6 and L10: after a skipped step nothing has moved; after an applied one, all replicas agree."""

import functools

import access
import everything
import keras
import pytest
import tensorflow as tf
from access import untuned
from everything import bits, moved
from helpers import Linear, attempt, copies, reset_step_count, slopes

import scaling
from scaling import Cause
from trainer import Updates
from trainer.step import TrainState, attempt_step, plan_step

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(3)]

RULE = scaling.DynamicLossScale(2.0**15)
SEED = 1


class Everything(everything.Everything):
    """Takes single steps."""

    def __init__(self, optimizer_name, **arguments):
        """Sets the rule."""
        super().__init__(optimizer_name, loss_scale=RULE, seed=SEED, **arguments)

    def step(self, batch):
        """Attempts one step; returns its report as numbers."""
        data = untuned(tf.data.Dataset.from_tensors(batch))
        access.start(self, next(iter(data)))
        report, _ = access.steps(self)(iter(data), tf.constant(1))
        return report._replace(**{k: v.numpy()[0].tolist() for k, v in report._asdict().items()})

    @property
    def state(self):
        """The loss scale, the counts and the seed."""
        return access.state(self)


class OwnLoop(everything.State):
    """The same step from the public functions, in a plain loop."""

    def __init__(self, optimizer_name, strategy):
        """Builds everything in scope."""
        with strategy.scope():
            self.model = everything.build_model()
            self.optimizer = everything.build_optimizer(optimizer_name)
            self.create()
            self.metrics = {"mean": keras.metrics.Mean()}
            self.plan = plan_step(
                strategy=strategy,
                model=self.model,
                optimizer=self.optimizer,
                compute_loss=self.compute_loss,
                rule=RULE,
                update_metrics=self.update_metrics,
                others=[self.generator, self.seen[1][0]],
            )
            self.state = TrainState(RULE, SEED)
        self.attempt = tf.function(lambda batch: attempt_step(batch, self.plan, self.state))

    @property
    def loss_scale(self):
        """The current loss scale."""
        return float(self.state.loss_scaler.loss_scale)

    def step(self, batch):
        """Attempts one step; returns its report as numbers."""
        report = self.attempt(batch)
        return report._replace(**{k: v.numpy().tolist() for k, v in report._asdict().items()})


MAKE = {
    "trainer": Everything,
    "own loop": OwnLoop,
    "one program": functools.partial(Everything, jit_compile="step"),
    "sums in bfloat16": functools.partial(Everything, updates=Updates(reduce_dtype="bfloat16")),
}
LOOPS = [(loop, replicas) for loop in ("trainer", "own loop") for replicas in (1, 2, 3)]
LOOPS.append(pytest.param("one program", 1, marks=pytest.mark.replicas(1)))
LOOPS.append(pytest.param("sums in bfloat16", 3, marks=pytest.mark.thorough))


@pytest.fixture(scope="module")
def loops(mirrored, full):
    """The trainer, the own loop, and the trainer whose step is one program, each built and traced
    once per strategy and optimizer. By default the first two run on 3 replicas with one of the two
    optimizers; `--full` runs all combinations.
    """
    made = {}
    usual = {("trainer", "adamw"), ("own loop", "momentum"), ("sums in bfloat16", "adamw")}

    def of(loop, replicas, optimizer):
        key = loop, replicas, optimizer
        if replicas > 1 and ((loop, optimizer) not in usual or replicas == 2) and not full:
            pytest.skip("only with --full")
        if key not in made:
            strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
            made[key] = MAKE[loop](optimizer, strategy=strategy)
            assert made[key].step(everything.batch(replicas=replicas)).grads_finite
        return made[key]

    return of


@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
@pytest.mark.parametrize(("loop", "replicas"), LOOPS)
@pytest.mark.parametrize("place", everything.PLACES)
@pytest.mark.parametrize("which", ["first", "last"])
def test_nothing_moves_on_a_skip(loops, loop, replicas, optimizer, place, which):
    """L6: weights, slots, iterations, averages, BatchNorm, Dropout's and the user's random numbers,
    spectral norms, a user's statistics, mean-aggregated and raw variables, and metrics keep their
    bits on every replica's copy, wherever the inf or NaN appears. An inf in one replica's input
    reaches every statistic of its forward pass; the other places come later.
    """
    replica = 0 if which == "first" else replicas - 1
    if place == "reduction" and replicas == 1:
        pytest.skip("there is no reduction on one replica")
    run = loops(loop, replicas, optimizer)
    before, scale = bits(run.moving()), run.loss_scale
    report = run.step(everything.batch(place, replica, replicas, 1, scale))

    cause = {"input": Cause.FORWARD, "loss": Cause.FORWARD}.get(place) or Cause[place.upper()]
    assert (report.grads_finite, Cause(report.cause)) == (False, cause)
    assert moved(before, bits(run.moving())) == []
    if cause in (Cause.FORWARD, Cause.BACKWARD):
        assert report.bad_replica == replica
    backs_off = cause in (Cause.BACKWARD, Cause.REDUCTION)
    assert run.loss_scale == (max(scale / 2, RULE.min_scale) if backs_off else scale)


@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
@pytest.mark.parametrize(("loop", "replicas"), LOOPS)
def test_everything_moves_on_an_update(loops, loop, replicas, optimizer):
    """The converse, without which the test above would show nothing: an applied step moves every
    variable except the learning rate and the state of Keras's seed generators, which get a key in
    each step and store nothing. Afterwards all copies agree (step 10), except random generators,
    whose copies are meant to differ, and metrics, which are summed over replicas.
    """
    run = loops(loop, replicas, optimizer)
    before = bits(run.moving())
    assert run.step(everything.batch(replicas=replicas, seed=2)).grads_finite
    still = {name.split(" copy")[0].split(" ", 1)[1] for name in before} - {
        name.split(" copy")[0].split(" ", 1)[1] for name in moved(before, bits(run.moving()))
    }

    rates = {"learning_rate"} if optimizer == "momentum" else set()  # a schedule is not a variable
    assert {name.split("/")[-1] for name in still} == {"seed_generator_state"} | rates
    for variable in run.moving():
        name = getattr(variable, "path", variable.name)
        if "StateVar" in name or "mean/" in name:
            continue
        assert len({copy.tobytes() for copy in copies(variable)}) == 1, name


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
def test_both_loops_take_the_same_steps(loops, optimizer):
    """L15: the trainer and the own loop take the same steps, to the bit, Dropout's
    masks included.
    """
    runs = [loops(loop, 1, optimizer) for loop in ("trainer", "own loop")]
    for run in runs:
        for variable, value in zip(run.moving(), start_values(runs[0]), strict=True):
            variable.assign(value)
        reset_step_count(run.state)
    for seed, place in enumerate([None, "input", None]):
        reports = [run.step(everything.batch(place, seed=seed)) for run in runs]

        assert reports[0].loss == reports[1].loss or place
    first, second = (list(bits(run.moving()).values()) for run in runs)

    assert first == second


def start_values(run):
    """The values of one run's variables, as a common start."""
    return [copies(variable)[0] for variable in run.moving()]


@pytest.mark.parametrize("what", ["a number", "a metric"])
def test_what_keras_would_lose_is_refused(what):
    """A number from Keras's global generator, or a metric updated in the loss, would be the same in
    every step; the error says where it belongs.
    """

    class Losing(Linear):
        def compute_loss(self, batch, training):
            losses = super().compute_loss(batch, training)
            if what == "a number":
                return losses * keras.random.normal([])
            self.metrics["mean"].update_state(losses)
            return losses

        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

    trainer = Losing(verbose=False)
    argument = "`seed`" if what == "a number" else "`compute_loss`"
    with pytest.raises(ValueError, match=f"{argument} must"):
        list(attempt(trainer, [slopes(1.0)]))

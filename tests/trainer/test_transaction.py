"""L6 and L10: after a skipped step, everything is as it was; after an applied one, replicas agree."""

import everything
import keras
import pytest
import tensorflow as tf
from helpers import copies

import scaling
from scaling import Cause
from trainer import Trainer
from trainer.step import TrainState, attempt_step, plan_step

RULE = scaling.DynamicLossScale(2.0**15)


class Everything(Trainer):
    """The model in which everything moves, with a random generator and a counter of the user's."""

    def __init__(self, optimizer_name, **arguments):
        """Makes the user's own in the strategy's scope."""
        super().__init__(loss_scale=RULE, verbose=False, **arguments)
        self.optimizer_name = optimizer_name
        with self.strategy.scope():
            self.generator = tf.random.Generator.from_seed(1)
            self.seen = {1: [read_apart(0.0)]}

    def build_model(self):
        """See `everything`."""
        return everything.build_model()

    def build_optimizer(self):
        """See `everything`."""
        return everything.build_optimizer(self.optimizer_name)

    def compute_loss(self, batch, training):
        """Draws a number and counts, beside the model's own writes."""
        self.seen[1][0].assign_add(self.generator.uniform([]))
        return everything.losses(self.model, batch), batch["x"][:, 0]

    def build_metrics(self):
        """A mean."""
        return {"mean": keras.metrics.Mean()}

    def update_metrics(self, batch, aux):
        """On applied steps only."""
        self.metrics["mean"].update_state(aux)

    def step(self, batch):
        """One attempt; returns its report as numbers."""
        data = tf.data.Dataset.from_tensors(batch)
        self._start(next(iter(data)))
        report, _ = self._run_steps(iter(data), tf.constant(1))
        return report._replace(**{k: v.numpy()[0].tolist() for k, v in report._asdict().items()})

    def moving(self):
        """Every variable a step could move, but the loss scale and the counts."""
        return [
            *self.model.variables,
            *self.optimizer.variables,
            *self.metrics["mean"].variables,
            self.model.layers[2].raw,
            self.generator.state,
            self.seen[1][0],
        ]


class OwnLoop:
    """The same through the functions that the trainer calls, in a plain loop."""

    def __init__(self, optimizer_name, strategy):
        """Builds everything in scope."""
        with strategy.scope():
            self.model = everything.build_model()
            self.optimizer = everything.build_optimizer(optimizer_name)
            self.generator = tf.random.Generator.from_seed(1)
            self.seen = read_apart(0.0)
            self.metric = keras.metrics.Mean()
            self.plan = plan_step(
                strategy=strategy,
                model=self.model,
                optimizer=self.optimizer,
                compute_loss=self.compute_loss,
                rule=RULE,
                update_metrics=self.update_metrics,
                others=[self.generator, self.seen],
            )
            self.state = TrainState(RULE)
        self.attempt = tf.function(lambda batch: attempt_step(batch, self.plan, self.state))

    def update_metrics(self, batch, aux):
        """As above."""
        del batch
        self.metric.update_state(aux)

    def compute_loss(self, batch, training):
        """As above."""
        del training
        self.seen.assign_add(self.generator.uniform([]))
        return everything.losses(self.model, batch), batch["x"][:, 0]

    @property
    def loss_scale(self):
        """The scale now."""
        return float(self.state.loss_scaler.loss_scale)

    def step(self, batch):
        """One attempt; returns its report as numbers."""
        report = self.attempt(batch)
        return report._replace(**{k: v.numpy().tolist() for k, v in report._asdict().items()})

    def moving(self):
        """Every variable a step could move, but the loss scale and the counts."""
        return [
            *self.model.variables,
            *self.optimizer.variables,
            *self.metric.variables,
            self.model.layers[2].raw,
            self.generator.state,
            self.seen,
        ]


def read_apart(value):
    """A variable of which every replica may write its own copy."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def bits(variables):
    """Every copy of every variable, by place and name."""
    return {
        f"{place} {getattr(variable, 'path', variable.name)} copy {copy}": value.tobytes()
        for place, variable in enumerate(variables)
        for copy, value in enumerate(copies(variable))
    }


def moved(before, after):
    """The names of what has other bits."""
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


@pytest.fixture(scope="module")
def ways(mirrored):
    """The trainer and the own loop, each made and traced once for a strategy and an optimizer."""
    made = {}

    def of(way, replicas, optimizer):
        key = way, replicas, optimizer
        if key not in made:
            strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
            kind = {"trainer": Everything, "own loop": OwnLoop}[way]
            made[key] = kind(optimizer, strategy=strategy)
            assert made[key].step(everything.batch(replicas=replicas)).grads_finite
        return made[key]

    return of


@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("way", ["trainer", "own loop"])
@pytest.mark.parametrize("place", everything.PLACES)
@pytest.mark.parametrize("which", ["first", "last"])
def test_nothing_moves_on_a_skip(ways, way, replicas, optimizer, place, which):
    """L6: weights, slots, iterations, averages, BatchNorm, Dropout's and the user's random numbers,
    spectral norms, a user's statistics, mean-aggregated and raw variables and metrics keep their
    bits on every replica's copy, wherever the inf or NaN is born: in the input, and so in every
    statistic of the forward pass on one replica only, or anywhere behind it.
    """
    replica = 0 if which == "first" else replicas - 1
    if place == "reduction" and replicas == 1:
        pytest.skip("one replica's gradients are summed over nothing")
    run = ways(way, replicas, optimizer)
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
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("way", ["trainer", "own loop"])
def test_everything_moves_on_an_update(ways, way, replicas, optimizer):
    """The converse, without which the test above shows nothing: an applied step moves every variable
    but the one that never does. Step 10: all copies agree afterwards, but for random generators,
    whose copies are meant to differ, and metrics, which add up.
    """
    run = ways(way, replicas, optimizer)
    before = bits(run.moving())
    assert run.step(everything.batch(replicas=replicas, seed=2)).grads_finite
    still = {name.split(" copy")[0].split(" ", 1)[1] for name in before} - {
        name.split(" copy")[0].split(" ", 1)[1] for name in moved(before, bits(run.moving()))
    }

    assert {name.split("/")[-1] for name in still} <= {"learning_rate"}
    for variable in run.moving():
        name = getattr(variable, "path", variable.name)
        if "StateVar" in name or "mean/" in name:
            continue
        assert len({copy.tobytes() for copy in copies(variable)}) == 1, name


@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
def test_both_ways_are_one(ways, optimizer):
    """L15: the trainer and the own loop take the same steps, to the bit."""
    runs = [ways(way, 1, optimizer) for way in ("trainer", "own loop")]
    for run in runs:
        for variable, value in zip(run.moving(), start_values(runs[0]), strict=True):
            variable.assign(value)
    for seed, place in enumerate([None, "input", None]):
        reports = [run.step(everything.batch(place, seed=seed)) for run in runs]

        assert reports[0].loss == reports[1].loss or place
    first, second = (list(bits(run.moving()).values()) for run in runs)

    assert first == second


def start_values(run):
    """The values of one run's variables, for all to start from."""
    return [copies(variable)[0] for variable in run.moving()]

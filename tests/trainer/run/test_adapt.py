"""What changes about a model or an optimizer between two calls of a trainer's methods."""

import sys
import types

import access
import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer import Action, Divergence, Monitoring, Trainer, Updates
from trainer.evaluation.ema_weights import evaluated_weights

pytestmark = pytest.mark.sampled

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=[12, 3]).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model():
    """Two dense layers with a factor between them."""
    layers = keras.layers
    hidden = layers.Dense(4, activation="tanh", name="hidden")
    return keras.Sequential(
        [
            keras.Input([3]),
            hidden,
            layers.Rescaling(1.0, name="factor"),
            layers.Dense(1, name="out"),
        ],
        name="net",
    )


def trainer_of(**arguments):
    """A trainer with plain SGD."""
    settings = {
        "model": model,
        "optimizer": lambda: keras.optimizers.SGD(0.125),
        "loss_fn": "mse",
        "verbose": False,
        "jit_compile": False,
        "seed": 1,
    }
    return Trainer(**settings | arguments)


def train(trainer, steps):
    """Trains up to a step; returns how far each weight moved."""
    before = trainer.model.get_weights()
    trainer.train((X, Y), steps=steps, global_batch=12)
    after = trainer.model.get_weights()
    return [float(np.abs(new - old).max()) for new, old in zip(after, before, strict=True)]


def toggle(trainer, hidden, out):
    """Freezes or unfreezes both layers."""
    trainer.model.get_layer("hidden").trainable = hidden
    trainer.model.get_layer("out").trainable = out


# Which of (hidden, out) are trained, for two steps each.
PHASES = [(False, True), (True, True), (True, False), (True, True)]


def adam():
    """Adam with moving averages of the weights."""
    return keras.optimizers.Adam(2.0**-7, use_ema=True, ema_momentum=0.5)


def plain_adam(weights):
    """Two steps of Adam in NumPy for each of `PHASES`; each weight counts its own updates.

    Returns the weights and their averages.
    """
    plain = model()
    plain.set_weights(weights)
    count, first, second = [0] * 4, [0.0] * 4, [0.0] * 4
    averages = [None] * 4
    for hidden, out in np.repeat(PHASES, 2, axis=0):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(X) - Y) ** 2)
        gradients = tape.gradient(loss, plain.trainable_variables)
        for at, (weight, gradient) in enumerate(
            zip(plain.trainable_variables, gradients, strict=True)
        ):
            if [hidden, hidden, out, out][at]:
                count[at] += 1
                first[at] = 0.9 * first[at] + 0.1 * gradient.numpy().astype(np.float64)
                second[at] = 0.999 * second[at] + 0.001 * gradient.numpy().astype(np.float64) ** 2
                size = np.sqrt(second[at] / (1 - 0.999 ** count[at])) + 1e-7
                weight.assign_sub(2.0**-7 * first[at] / (1 - 0.9 ** count[at]) / size)
            new = weight.numpy()
            mean = averages[at]
            averages[at] = new if mean is None else 0.5 * mean + 0.5 * new
    return plain.get_weights(), averages


@pytest.mark.thorough
def test_layers_are_frozen_and_unfrozen(mirrored):
    """L19: a layer that is frozen between two calls keeps its weights; one that is unfrozen is trained
    as by an optimizer that counts each variable's own updates. The averages belong to their weights.
    """
    trainer = trainer_of(strategy=mirrored(3), optimizer=adam)
    weights, averages = plain_adam(trainer.model.get_weights())
    for phase, trained in enumerate(PHASES):
        toggle(trainer, *trained)
        moved = train(trainer, 2 * phase + 2)
        assert [move > 0.0 for move in moved] == list(np.repeat(trained, 2))

    for one, other in zip(trainer.model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    with evaluated_weights(access.plan(trainer), averaged=True):
        for one, other in zip(trainer.model.get_weights(), averages, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


def phases(folder, last, steps, **arguments):
    """Runs the first phases, each up to a multiple of two steps, and the last one up to a step."""
    trainer = trainer_of(**{"model_dir": folder, "optimizer": adam} | arguments)
    for phase, trained in enumerate(PHASES[:last]):
        toggle(trainer, *trained)
        train(trainer, min(2 * phase + 2, steps))
    return trainer


def assert_same_state(one, other):
    """Raises unless two trainers have the same bits in weights and slots."""
    for trainers in zip(
        [*one.model.variables, *one.optimizer.variables],
        [*other.model.variables, *other.optimizer.variables],
        strict=True,
    ):
        values = [variable.numpy() for variable in trainers]
        assert values[0].tobytes() == values[1].tobytes(), trainers[0].path


@pytest.mark.slow
def test_a_run_of_phases_resumes(tmp_path):
    """L12: the same program, started again in any phase, ends with the bits of a run never stopped."""
    whole = phases(None, 4, 8)
    for stopped in range(1, 8):
        folder = tmp_path / str(stopped)
        phases(folder, (stopped + 1) // 2, stopped)
        assert_same_state(phases(folder, 4, 8), whole)


@pytest.mark.slow
def test_other_trained_variables_are_not_resumed(tmp_path):
    """L12: a resumed run does not train other variables than its checkpoint did, unless they were
    changed after it was restored.
    """
    phases(tmp_path, 2, 3)
    trainer = trainer_of(model_dir=tmp_path, optimizer=adam)
    toggle(trainer, hidden=False, out=True)
    with pytest.raises(ValueError, match="`model`"):
        train(trainer, 8)
    train(trainer, 3)
    toggle(trainer, hidden=True, out=False)
    assert [move > 0.0 for move in train(trainer, 4)] == [True, True, False, False]


@pytest.mark.thorough
def test_lora():
    """L19: variables that appear between two calls are trained, and the kernel that they replace is not."""
    trainer = trainer_of(optimizer=adam)
    train(trainer, 1)
    layer = trainer.model.get_layer("out")
    layer.enable_lora(2)
    kernel, before = (
        layer._kernel.numpy(),
        [layer.lora_kernel_a.numpy(), layer.lora_kernel_b.numpy()],
    )
    trainer.train((X, Y), steps=3, global_batch=12)

    assert np.all(layer._kernel.numpy() == kernel)
    assert np.all(layer.lora_kernel_a.numpy() != before[0])
    assert np.all(layer.lora_kernel_b.numpy() != before[1])


@pytest.mark.thorough
def test_lora_is_resumed(tmp_path):
    """L12: a program that was stopped after `enable_lora` calls it before its first `train`."""

    def run(folder, *stops, lora_at_once=False):
        trainer = trainer_of(model_dir=tmp_path / folder, optimizer=adam)
        layer = trainer.model.get_layer("out")
        if lora_at_once:
            layer.enable_lora(2)
        for stop in stops:
            train(trainer, stop)
            if stop == 1:
                keras.utils.set_random_seed(7)  # Keras draws the weights of LoRA
                layer.enable_lora(2)
        return trainer.model.get_weights()

    whole = run("whole", 1, 4)
    run("parts", 1, 3)
    resumed = run("parts", 4, lora_at_once=True)

    assert [each.tobytes() for each in resumed] == [each.tobytes() for each in whole]


@pytest.mark.slow
def test_a_part_is_frozen_for_a_while(tmp_path):
    """Of two optimizers, that of a frozen part makes no updates; both go on when it is unfrozen."""

    class Two(Trainer):
        def build_model(self):
            layers = keras.layers
            inputs = keras.Input([3])
            two = keras.Model(
                inputs, layers.Dense(1, name="out")(layers.Dense(2, name="hidden")(inputs))
            )
            two.hidden, two.out = two.get_layer("hidden"), two.get_layer("out")
            return two

        def build_optimizer(self):
            return {name: keras.optimizers.Adam(0.125) for name in ("hidden", "out")}

        def compute_loss(self, batch, training):
            losses = (
                tf.cast(self.model(batch[0], training=training) - batch[1], tf.float32)[:, 0] ** 2
            )
            return {"hidden": losses, "out": losses}

    two = Two(verbose=False, jit_compile=False, seed=1, model_dir=tmp_path)
    train(two, 1)
    two.model.hidden.trainable = False
    moved = train(two, 3)
    assert [move > 0.0 for move in moved] == [False, False, True, True]
    two.model.hidden.trainable = True
    assert min(train(two, 4)) > 0.0
    assert [int(one.iterations.numpy()) for one in two.optimizer.values()] == [2, 4]


@pytest.mark.thorough
def test_a_rollback_after_unfreezing(tmp_path):
    """A run that diverges right after a layer was unfrozen goes back to where it was unfrozen."""
    losses = np.float32([1, 1, 1, 1, 1e6, 1, 1])

    class Line(Trainer):
        def compute_loss(self, batch, training):
            return batch[1][:, 0] + 1e-6 * tf.reduce_sum(self.model(batch[0], training=training), 1)

        def on_recovery(self, step, restored):
            self.seen = (step, restored)

    data = tf.data.Dataset.from_tensor_slices(
        (np.ones([7, 1, 3], np.float32), losses[:, None, None])
    )
    line = Line(
        model=model,
        optimizer=adam,
        model_dir=tmp_path,
        monitoring=Monitoring(divergence=Divergence(loss_above=100.0, skip_data=True)),
        log_interval=1,
        jit_compile=False,
        verbose=False,
    )
    toggle(line, hidden=False, out=True)
    line.train(data, steps=4)
    toggle(line, hidden=True, out=True)
    line.train(data, steps=6)

    assert line.seen == (5, 4)
    assert int(line.optimizer.iterations.numpy()) == 6


@pytest.mark.thorough
def test_what_is_evaluated_may_be_frozen():
    """Evaluation and prediction train nothing, so a frozen model is not refused there."""
    trainer = trainer_of()
    train(trainer, 1)
    expected = trainer.evaluate((X, Y), global_batch=12)
    trainer.model.trainable = False

    assert trainer.evaluate((X, Y), global_batch=12) == expected
    assert trainer.predict(X, global_batch=12).shape == (12, 1)


def piecewise(*rates):
    """A schedule with these learning rates, each for two updates."""
    places = [2 * place for place in range(1, len(rates))]
    return keras.optimizers.schedules.PiecewiseConstantDecay(places, list(rates))


@pytest.mark.slow
def test_a_new_learning_rate_is_used(tmp_path):
    """L10: a number or a schedule that is assigned to `learning_rate` between two calls is used from the
    next step on, and the run can be saved and resumed.
    """
    trainer = trainer_of()
    assert min(train(trainer, 1)) > 0.0
    trainer.optimizer.learning_rate = 0.0
    assert max(train(trainer, 2)) == 0.0
    trainer.optimizer.learning_rate = 0.125
    assert min(train(trainer, 3)) > 0.0

    settings = {
        "model_dir": tmp_path,
        "optimizer": lambda: keras.optimizers.SGD(piecewise(0.125, 0.0)),
    }
    trainer = trainer_of(**settings)
    assert min(train(trainer, 1)) > 0.0
    trainer.optimizer.learning_rate = piecewise(0.0, 0.125)
    assert max(train(trainer, 2)) == 0.0
    assert min(train(trainer, 4)) > 0.0  # the next updates have iterations == 2 and more
    resumed = trainer_of(**settings)
    train(resumed, 4)

    assert int(resumed.optimizer.iterations.numpy()) == 4
    for one, other in zip(resumed.model.get_weights(), trainer.model.get_weights(), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.slow
def test_a_schedule_in_place_of_a_number(tmp_path):
    """L12: a schedule that is assigned in place of a number is used from the next step on, and the run can
    be saved; the same program, started again, ends with the same bits.
    """

    def run(folder, steps):
        trainer = trainer_of(model_dir=folder, optimizer=lambda: keras.optimizers.SGD(0.125, 0.5))
        train(trainer, 1)
        trainer.optimizer.learning_rate = piecewise(0.125, 0.0, 0.125)
        if steps > 1:
            train(trainer, steps)
        return trainer

    whole = run(None, 5)
    run(tmp_path, 3)
    assert_same_state(run(tmp_path, 5), whole)
    whole.optimizer.learning_rate = piecewise(0.0, 0.0)
    whole.optimizer.momentum = 0.0
    assert max(train(whole, 6)) == 0.0


@pytest.mark.thorough
def test_a_schedule_that_was_assigned_before_the_first_step(tmp_path):
    """An optimizer whose number was replaced before it was built can be saved."""

    def make():
        made = keras.optimizers.SGD(0.125)
        made.learning_rate = piecewise(0.125, 0.0)
        return made

    train(trainer_of(model_dir=tmp_path, optimizer=make), 3)
    trainer = trainer_of(model_dir=tmp_path, optimizer=make)
    train(trainer, 3)

    assert max(train(trainer, 4)) == 0.0


@pytest.mark.slow
def test_settings_of_layers_and_optimizers_are_used():
    """What the traced step holds as numbers is traced again if it changes; nothing else is."""
    trainer = trainer_of(updates=Updates(ema_momentum=0.5))
    train(trainer, 1)
    run_steps = access.steps(trainer)
    train(trainer, 2)
    assert access.steps(trainer) is run_steps
    trainer.model.get_layer("factor").scale = 0.0
    moved = train(trainer, 3)
    assert access.steps(trainer) is not run_steps
    assert (moved[0], moved[2]) == (0.0, 0.0)  # all activations are 0
    trainer.model.get_layer("factor").scale = 1.0
    trainer.optimizer.clipnorm = 2.0**-10

    assert max(train(trainer, 4)) <= 2.0**-13 * 1.0001
    assert trainer.optimizer.ema_momentum == 0.5
    assert int(trainer.optimizer.iterations.numpy()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_another_static_batch_size(num_microbatches):
    """L8: batches of another fixed size take the same steps as in a plain loop."""

    def data(size):
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, drop_remainder=True).take(1)

    trainer = trainer_of(num_microbatches=num_microbatches)
    plain = model()
    sgd = keras.optimizers.SGD(0.125)
    for step, size in enumerate([12, 6, 4]):
        trainer.train(data(size), steps=step + 1) if step else train_first(
            trainer, data(size), plain
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(X[:size]) - Y[:size]) ** 2)
        sgd.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)
        for one, other in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


def train_first(trainer, data, plain):
    """Gives a plain model the trainer's initial weights, and takes one step."""
    plain.set_weights(trainer.model.get_weights())
    trainer.train(data, steps=1)


@pytest.mark.thorough
def test_a_change_during_training_is_refused():
    """L19: hooks and actions cannot change what is trained, or the settings of an optimizer."""

    def freeze(trainer):
        trainer.model.get_layer("hidden").trainable = False

    def slow_down(trainer):
        trainer.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)

    for change in (freeze, slow_down):
        with pytest.raises(ValueError, match="while `train` runs"):
            train(trainer_of(callbacks=[Action(change, every_steps=1)]), 3)


class Scaled(Trainer):
    """Its loss reads an attribute."""

    beta = 1.0

    def compute_loss(self, batch, training):
        """Reads the attribute."""
        losses, outputs = super().compute_loss(batch, training)
        return losses * self.beta, outputs


@pytest.mark.parametrize("on_class", [False, True])
def test_what_the_loss_reads_may_change_between_two_calls(on_class):
    """An attribute of the trainer is read anew; after one of its class, `retrace` is needed."""
    cls = type("Own", (Scaled,), {})
    arguments = {"model": model, "optimizer": lambda: keras.optimizers.SGD(0.0), "loss_fn": "mse"}
    trainer = cls(**arguments, verbose=False, jit_compile=False, seed=1)
    before = trainer.train((X, Y), steps=1, global_batch=12).history["loss"][-1]
    (cls if on_class else trainer).beta = 2.0
    if on_class:
        trainer.retrace()
    after = trainer.train((X, Y), steps=2, global_batch=12).history["loss"][-1]
    assert after == pytest.approx(2 * before)


@pytest.mark.thorough
def test_a_rate_that_changes_between_two_calls_is_used():
    """The numbers of a schedule are those of the next call's updates."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.0, 10, 0.9)
    trainer = trainer_of(optimizer=lambda: keras.optimizers.SGD(rate))
    assert max(train(trainer, 1)) == 0.0
    rate.initial_learning_rate = 0.125
    assert max(train(trainer, 2)) > 0.0


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_the_model_and_the_optimizer_stay(name):
    """L12: another one would go on with the counts and the checkpoints of the first."""
    trainer = trainer_of()
    train(trainer, 1)
    setattr(trainer, name, {"model": model, "optimizer": keras.optimizers.SGD}[name]())
    with pytest.raises(ValueError, match=f"`{name}`"):
        trainer.train((X, Y), steps=2, global_batch=12)


@pytest.mark.thorough
def test_a_setting_that_is_assigned_between_two_calls_is_used():
    """Attributes of a trainer are ordinary ones, and what the step reads is read anew."""
    trainer = trainer_of()
    train(trainer, 1)
    trainer.updates = Updates(global_clipnorm=2.0**-10)
    assert 0.0 < max(train(trainer, 2)) <= 2.0**-13 * 1.0001


class Own(Trainer):
    """Keeps its arguments under their names, and assigns its parts itself."""

    def __init__(self, early, seed=1, **arguments):
        """Assigns the model and the optimizer before or after the constructor of `Trainer`."""
        if early:
            self.model, self.optimizer = model(), keras.optimizers.SGD(0.5)
        super().__init__(seed=seed, loss_fn="mse", verbose=False, **arguments)
        if not early:
            self.model, self.optimizer = model(), keras.optimizers.SGD(0.5)
        self.seed, self.verbose, self.alpha, self.state = seed, True, 0.1, {}


@pytest.mark.thorough
@pytest.mark.parametrize("early", [True, False])
def test_a_subclass_keeps_what_it_likes(early):
    """Its attributes may have any name, and the parts that it assigns are trained."""
    trainer = Own(early)
    assert trainer.has_optimizer
    assert min(train(trainer, 1)) > 0.0
    trainer.alpha, trainer.verbose = 0.2, False
    assert (trainer.alpha, trainer.verbose, trainer.seed) == (0.2, False, 1)


def helper(losses):
    """Is replaced in the tests below."""
    return 0 * losses + 3.0


class Redefined(Trainer):
    """Its loss calls a function of the module."""

    def compute_loss(self, batch, training):
        """Calls the helper."""
        losses, outputs = super().compute_loss(batch, training)
        return helper(losses), outputs


@pytest.fixture
def redefined():
    """A trainer that has taken a step, whose helper is restored after the test."""
    before = helper.__code__
    settings = {"model": model, "optimizer": "sgd", "loss_fn": "mse", "jit_compile": False}
    trainer = Redefined(**settings, verbose=False, log_interval=1, seed=1)
    assert trainer.train((X, Y), steps=1, global_batch=12).history["loss"] == [3.0]
    yield trainer
    helper.__code__ = before


def loss_of(trainer, steps):
    """The loss at a step."""
    return trainer.train((X, Y), steps=steps, global_batch=12).history["loss"][-1]


def five(losses):
    """Another helper."""
    return 0 * losses + 5.0


class Shell:
    """Stands for IPython."""

    execution_count = 1


@pytest.fixture
def ipython(monkeypatch):
    """A module IPython whose shell executes cells."""
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return shell


@pytest.mark.thorough
def test_each_cell_runs_the_code_as_it_is_now(ipython, redefined):
    """In IPython, a helper of the loss that is redefined is run in the next cell, not before."""
    ipython.execution_count = 2
    assert loss_of(redefined, 2) == 3.0
    traces = access.steps(redefined).experimental_get_tracing_count()
    assert loss_of(redefined, 3) == 3.0
    assert access.steps(redefined).experimental_get_tracing_count() == traces
    helper.__code__ = five.__code__
    ipython.execution_count = 3
    assert loss_of(redefined, 4) == 5.0


@pytest.mark.thorough
def test_train_on_batch_runs_the_code_of_its_cell(ipython, redefined):
    """`train_on_batch` traces anew in another cell; evaluate and predict do, too."""
    batch = X[:12], Y[:12]
    assert redefined.train_on_batch(batch)["loss"] == 3.0
    helper.__code__ = five.__code__
    assert redefined.train_on_batch(batch)["loss"] == 3.0
    ipython.execution_count = 2
    assert redefined.train_on_batch(batch)["loss"] == 5.0
    assert redefined.evaluate(batch, global_batch=12)["loss"] == 5.0


def test_each_call_in_pythons_shell_runs_the_code_as_it_is_now(monkeypatch, redefined):
    """Without IPython, an interactive session traces each call."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    helper.__code__ = five.__code__
    assert loss_of(redefined, 2) == 5.0


@pytest.mark.thorough
def test_a_script_keeps_its_trace_until_retrace(redefined):
    """In a script, a redefined helper is run after `retrace`, also by `train_on_batch`."""
    batch = X[:12], Y[:12]
    helper.__code__ = five.__code__
    assert loss_of(redefined, 2) == 3.0
    assert redefined.train_on_batch(batch)["loss"] == 3.0
    redefined.retrace()
    assert redefined.train_on_batch(batch)["loss"] == 5.0
    assert loss_of(redefined, 4) == 5.0


def test_a_method_that_is_assigned_is_run(redefined):
    """An attribute of the trainer may be a method. A setting of ours traces nothing anew."""
    before = redefined.compute_loss
    redefined.compute_loss = lambda batch, training: before(batch, training)[0] + 4.0
    assert loss_of(redefined, 2) == 7.0
    parts = redefined._parts
    redefined.log_interval = 2
    assert loss_of(redefined, 4) == 7.0
    assert redefined._parts is parts


@pytest.mark.thorough
def test_a_model_that_is_first_used_in_a_graph_is_built_outside_of_it():
    """`trainer.model` may be touched first inside of a `tf.function`."""
    trainer = trainer_of()

    @tf.function
    def outputs(x):
        return trainer.model(x)

    assert outputs(X).shape[0] == len(X)
    assert len(train(trainer, 1)) == len(trainer.model.trainable_variables)


class Counted(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration, which counts its calls."""

    def __init__(self):
        """Begins at 0."""
        self.calls = 0

    def __call__(self, step):
        """Returns one rate."""
        self.calls += 1
        return 0.125 + 0.0 * tf.cast(step, tf.float32)


@pytest.mark.thorough
def test_a_schedule_may_count_its_calls():
    """What a schedule without a configuration holds is its own affair, also beside hooks."""
    schedule = Counted()
    trainer = trainer_of(
        optimizer=lambda: keras.optimizers.SGD(schedule),
        callbacks=[Action(lambda _: schedule(1), every_steps=1)],
    )
    assert max(train(trainer, 2)) > 0
    parts = trainer._parts
    assert max(train(trainer, 4)) > 0
    assert trainer._parts is parts


@pytest.mark.thorough
def test_batches_go_on_with_what_an_evaluation_has_traced(tmp_path):
    """An attribute that was set before `evaluate` is seen by `train_on_batch`; the run is saved."""
    settings = {"model": model, "optimizer": "sgd", "loss_fn": "mse", "jit_compile": False}
    trainer = Scaled(**settings, verbose=False, seed=1, model_dir=tmp_path)
    trainer.train_on_batch((X, Y))
    trainer.beta = 0.0
    assert trainer.evaluate((X, Y), global_batch=12)["loss"] == 0.0
    assert trainer.train_on_batch((X, Y))["loss"] == 0.0
    trainer.save_checkpoint()
    trainer.train((X, Y), steps=3, global_batch=12)
    assert trainer.totals.attempted == 3

"""L11 and L17: a skipped step reports its cause and place, and no run is silently stuck."""

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Linear, all_copies, attempt, copies, slopes
from hypothesis import given, settings
from hypothesis import strategies as st

import scaling
from scaling import Cause
from trainer import Skips, Totals, Updates

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(3)]

HALF = {"precision": "mixed_float16", "jit_compile": False}
LARGEST = float(np.finfo(np.float32).max)
REPLICAS, VARIABLES, ELEMENTS = 3, 3, 4
EXAMPLES = 2 * REPLICAS
BAD = [np.inf, -np.inf, np.nan]


@tf.custom_gradient
def with_poison(weight, poison):
    """Returns the weight; in the backward pass, adds the poison to its scaled gradient."""
    return tf.identity(weight), lambda upstream: (upstream + poison, None)


class Three(Linear):
    """A plain module with three weights of four elements. A batch can poison any
    gradient or loss.
    """

    def build_model(self):
        """A module with three float32 weights."""
        model = tf.Module()
        model.weights = [tf.Variable(tf.ones([ELEMENTS]), name=f"weight_{i}") for i in range(3)]
        return model

    def build_optimizer(self):
        """Momentum, so that there are slots."""
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def compute_loss(self, batch, training):
        """The sum of all elements plus the batch's own term."""
        del training
        poison = tf.reduce_sum(batch["poison"], axis=0)
        sums = [
            tf.reduce_sum(with_poison(tf.convert_to_tensor(weight), poison[place]))
            for place, weight in enumerate(self.model.weights)
        ]
        return tf.add_n(sums) + batch["loss"]

    def bits(self):
        """The bits of every copy of the weights and of the optimizer's variables."""
        variables = [*self.model.weights, *self.optimizer.variables]
        return [[copy.tobytes() for copy in copies(variable)] for variable in variables]


def poison(where=(), losses=()):
    """A batch with two examples per replica.

    Args:
        where: pairs of (replica, variable, element) and the value to add to that scaled gradient.
        losses: pairs of an example and the value to add to its loss.
    """
    batch = {
        "poison": np.zeros([EXAMPLES, VARIABLES, ELEMENTS], np.float32),
        "loss": np.zeros(EXAMPLES, np.float32),
    }
    for (replica, variable, element), value in where:
        batch["poison"][2 * replica, variable, element] = value
    for example, value in losses:
        batch["loss"][example] = value
    return batch


def place_of(report):
    """The replica, the variable, and the counts of inf and NaN in a report."""
    return report.bad_replica, report.bad_variable, report.inf_count, report.nan_count


def inf_and_nan_counts(values):
    """The counts of inf and NaN."""
    return int(np.isinf(values).sum()), int(np.isnan(values).sum())


@pytest.fixture(scope="module")
def traced(mirrored):
    """A trainer of `Three` on three replicas, traced once."""
    trainer = Three(strategy=mirrored(REPLICAS), loss_scale=scaling.DynamicLossScale(2.0**15))
    [report] = attempt(trainer, [poison()])
    assert report.grads_finite
    return trainer


@pytest.fixture
def three(traced):
    """The traced trainer with its first scale and finite weights."""
    access.state(traced).loss_scaler.assign(traced.rule.initial_state())
    for weight in traced.model.weights:
        weight.assign(tf.ones([ELEMENTS]))
    return traced


def check_backward(trainer, where):
    """Runs one step and compares its report with the gradients summed in NumPy."""
    access.state(trainer).loss_scaler.assign(trainer.rule.initial_state())
    before = trainer.bits()
    [report] = attempt(trainer, [poison(where)])
    gradients = np.zeros([REPLICAS, VARIABLES, ELEMENTS])
    for place, value in where:
        gradients[place] = value
    replica = next(place for place in range(REPLICAS) if not np.isfinite(gradients[place]).all())
    bad = [not np.isfinite(gradients[replica, place]).all() for place in range(VARIABLES)]
    with np.errstate(invalid="ignore"):
        sums = gradients.sum(axis=0)
    summed = sums[bad.index(True)]
    # NaN without an inf is tested at the smallest scale, where these gradients are NaN, too.
    cause = Cause.BACKWARD if np.isinf(sums).any() else Cause.MODEL

    assert (report.grads_finite, Cause(report.cause)) == (False, cause)
    assert place_of(report) == (replica, bad.index(True), *inf_and_nan_counts(summed))
    assert trainer.bits() == before
    assert trainer.loss_scale == (2.0**14 if cause is Cause.BACKWARD else 2.0**15)


@pytest.mark.thorough
@pytest.mark.parametrize("replica", range(REPLICAS))
@pytest.mark.parametrize("variable", range(VARIABLES))
def test_backward_names_variable_and_replica(three, replica, variable):
    """L17: inf or NaN in one or several elements of one variable's gradient on one replica is
    attributed to that replica and variable, with the counts.
    """
    for value in BAD:
        check_backward(three, [((replica, variable, 1), value)])
    check_backward(three, [((replica, variable, i), [*BAD, np.nan][i]) for i in range(ELEMENTS)])


PLACES = st.tuples(*(st.integers(0, size - 1) for size in (REPLICAS, VARIABLES, ELEMENTS)))


@pytest.mark.slow
def test_backward_names_the_first_of_many(traced, full):
    """L17: if several gradients are bad, the report names the first bad variable on the first bad
    replica, and counts in that gradient summed over replicas, where inf plus -inf is NaN.
    """

    @settings(max_examples=80 if full else 40)
    @given(st.dictionaries(PLACES, st.sampled_from([*BAD, 1.0]), min_size=1, max_size=12), PLACES)
    def search(where, place):
        check_backward(traced, list({**where, place: np.inf}.items()))

    search()


@pytest.mark.thorough
def test_forward_names_the_replica_and_counts_losses(three):
    """L17: the report names the first replica with an inf or NaN loss and counts its bad losses. It
    names no variable, an overflow on an earlier replica does not matter, and the loss scale stays.
    """
    before = three.bits()
    for replica in range(REPLICAS):
        first = 2 * replica
        for losses in (
            [(first, np.nan)],
            [(first + 1, np.inf)],
            [(first, -np.inf), (first + 1, np.inf)],
            [(first, np.nan), (first + 1, np.inf)],
            [(first, np.nan), (EXAMPLES - 1, np.nan)],
        ):
            for where in ([], [((0, 1, 1), np.inf)]):
                [report] = attempt(three, [poison(where, losses)])
                own = [value for example, value in losses if example // 2 == replica]

                assert (report.grads_finite, Cause(report.cause)) == (False, Cause.FORWARD)
                assert place_of(report) == (replica, -1, *inf_and_nan_counts(own))
    assert three.bits() == before
    assert three.loss_scale == 2.0**15


@pytest.mark.thorough
@pytest.mark.parametrize("variable", range(VARIABLES))
def test_reduction_names_the_variable(three, variable):
    """L17: if each replica's gradient is finite but their sum is not, the report names no replica
    and the first variable whose sum is not finite.
    """
    elements = [0, 2, 3][: variable + 1]
    where = [
        ((replica, place, element), 0.45 * LARGEST)
        for replica in range(REPLICAS)
        for place in {variable, VARIABLES - 1}
        for element in elements
    ]
    before = three.bits()
    [report] = attempt(three, [poison(where)])

    assert (report.grads_finite, Cause(report.cause)) == (False, Cause.REDUCTION)
    assert place_of(report) == (-1, variable, len(elements), 0)
    assert three.bits() == before
    assert three.loss_scale == 2.0**14


@pytest.mark.parametrize("variable", range(VARIABLES))
def test_unscaling_names_the_variable(three, variable):
    """L17: a gradient that overflows when divided by the scale is attributed to its variable, with
    the number of such elements, or with 0 if only its square overflows. Even at the smallest scale
    the cause is not MODEL.
    """
    rule = three.rule
    before = three.bits()
    for scale, value, count in [
        (rule.min_scale, 1e35, 2),
        (rule.min_scale, 1e25, 0),
        (2.0**15, 1e30, 0),
    ]:
        state = rule.initial_state()._replace(loss_scale=tf.constant(scale))
        access.state(three).loss_scaler.assign(state)
        where = [((1, place, e), value) for place in {variable, VARIABLES - 1} for e in (0, 3)]
        [report] = attempt(three, [poison(where)])

        assert (report.grads_finite, Cause(report.cause)) == (False, Cause.UNSCALING)
        assert place_of(report) == (-1, variable, count, 0)
        assert three.loss_scale == scale
    assert three.bits() == before


@pytest.mark.thorough
def test_an_overflow_in_the_global_norm_alone_names_no_variable(three):
    """L17: three gradients whose squares each fit float32 but whose sum of squares does not are
    attributed to no variable.
    """
    where = [((0, place, 0), 1.5e19 * 2.0**15) for place in range(VARIABLES)]
    [report] = attempt(three, [poison(where)])

    assert (report.grads_finite, Cause(report.cause)) == (False, Cause.UNSCALING)
    assert place_of(report) == (-1, -1, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("variable", range(VARIABLES))
@pytest.mark.parametrize("value", BAD)
def test_bad_weights_take_precedence_over_their_consequences(three, variable, value):
    """L17: a weight that is inf or NaN before the step is the cause, not the NaN loss that follows.
    The other weights and the loss scale stay, and the run is halted.
    """
    three.model.weights[variable].assign([1.0, value, value, 1.0])
    before = three.bits()
    [report] = attempt(three, [poison([((0, 0, 0), np.inf)], [(0, np.nan)])])

    assert (report.grads_finite, Cause(report.cause)) == (False, Cause.WEIGHTS)
    assert place_of(report) == (-1, variable, *inf_and_nan_counts([value, value]))
    assert three.bits() == before
    assert three.loss_scale == 2.0**15
    assert access.state(three).halted.numpy()


@pytest.mark.thorough
def test_an_overflow_at_the_floor_is_attributed_to_the_model():
    """L17: the same overflow has the cause "backward" above `min_scale` and "model" at it, where
    the whole state of the rule stays unchanged.
    """
    rule = scaling.DynamicLossScale(
        2.0, min_scale=1.0, growth_interval=4, hysteresis=2, hysteresis_refill="finite_step"
    )
    trainer = Linear(loss_scale=rule, **HALF)
    history = [2.0**17, 2.0**17, 1.0, 1.0, *[2.0**17] * 3, 1.0, 1.0]
    seen = []
    for report in attempt(trainer, [slopes(slope) for slope in history]):
        state = [float(number) for number in access.state(trainer).loss_scaler.state]
        seen.append((Cause(report.cause).name, *state))

    assert seen == [
        ("BACKWARD", 2.0, 0, 1),
        ("BACKWARD", 1.0, 0, 0),
        ("NONE", 1.0, 1, 2),
        ("NONE", 1.0, 2, 2),
        *[("MODEL", 1.0, 2, 2)] * 3,
        ("NONE", 1.0, 3, 2),
        ("NONE", 2.0, 0, 2),
    ]
    assert trainer.totals == Totals(4, {"backward": 2, "model": 3})


@pytest.mark.thorough
@pytest.mark.parametrize(("replicas", "attribute_causes"), [(1, True), (1, False), (3, False)])
def test_every_skip_backs_off_without_attribution(mirrored, replicas, attribute_causes):
    """L17: attribute_causes=False halves the scale after every skip, as PyTorch does, and still
    reports the cause. With attribution only overflows halve it.
    """
    trainer = Linear(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        loss_scale=scaling.DynamicLossScale(2.0**10, min_scale=2.0**-2, growth_interval=2),
        skips=Skips(attribute_causes=attribute_causes),
        **HALF,
    )
    history = [np.inf, 1.0, np.nan, 2.0**10, 1.0, 1.0, *[-np.inf] * 12, 1.0]
    scale, finite_steps = 2.0**10, 0
    reports = attempt(trainer, [slopes(*[1.0] * (replicas - 1), slope) for slope in history])
    for slope, report in zip(history, reports, strict=True):
        cause = Cause.NONE if np.isfinite(slope) else Cause.FORWARD
        # A replica's gradient is its slope's share of the mean.
        cause = Cause.BACKWARD if np.isfinite(slope) and slope * scale / replicas > 65504 else cause
        assert (Cause(report.cause), report.loss_scale) == (cause, scale)
        if cause is Cause.NONE:
            finite_steps += 1
            if finite_steps == 2:
                scale, finite_steps = scale * 2, 0
        elif cause is Cause.BACKWARD or not attribute_causes:
            scale, finite_steps = max(scale / 2, 2.0**-2), 0

        assert trainer.loss_scale == scale
    assert (scale == 2.0**-2) is not attribute_causes


def test_without_attribution_a_bad_loss_is_still_not_retried():
    """L6: attribute_causes=False changes what the rule is told, not which causes another scale can
    cure.
    """
    trainer = Linear(
        loss_scale=scaling.DynamicLossScale(2.0**10),
        skips=Skips(attribute_causes=False, on_overflow="retry"),
        **HALF,
    )
    [report] = attempt(trainer, [slopes(np.nan)])

    assert (report.grads_finite, report.retries) == (False, 0)
    assert trainer.loss_scale == 2.0**9


class Steep(Linear):
    """Its slope of 2^20 overflows float16 at every scale from 1, and moves the weight by 1."""

    def build_optimizer(self):
        """A low learning rate, so that the weight stays small."""
        return keras.optimizers.SGD(2.0**-20)


class WithAux(Steep):
    """`Steep` with a sum of the model's outputs, which are float16."""

    def compute_loss(self, batch, training):
        """The losses and the outputs."""
        outputs = self.model(batch["x"], training=training)
        return tf.cast(outputs[:, 0], tf.float32) * batch["slope"], {"outputs": outputs}

    def build_metrics(self):
        """Returns a sum."""
        return {"sum": keras.metrics.Sum()}

    def update_metrics(self, batch, aux):
        """Updates the sum. The outputs have the same dtype even when the step computed
        in float32.
        """
        assert aux["outputs"].dtype == tf.float16
        self.metrics["sum"].update_state(tf.cast(aux["outputs"], tf.float32))


STEEP = 2.0**20
# Grows after every finite step, so that a step that moves the rule's state shows.
FLOOR = scaling.DynamicLossScale(1.0, min_scale=1.0, growth_interval=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "replicas", "num_microbatches", "jit_compile"),
    [
        (Steep, 1, 1, False),
        (Steep, 3, 1, False),
        (WithAux, 3, 2, False),
        (WithAux, 1, 2, True),
    ],
)
def test_a_stuck_run_takes_one_step_in_float32(
    mirrored, kind, replicas, num_microbatches, jit_compile
):
    """L11: after `max_consecutive` skips, one step is computed in float32 and applied
    exactly; then half precision is tried resumed. The float32 step does not move the loss-scale
    state, and the next successful step in half precision does.
    """
    trainer = kind(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        loss_scale=FLOOR,
        skips=Skips(on_stuck="float32", max_consecutive=2),
        num_microbatches=num_microbatches,
        precision="mixed_float16",
        jit_compile=jit_compile,
    )
    size = 2 * replicas
    history = [*[STEEP] * 6, 1.0, STEEP, 1.0]
    weight, row, scale, total = 1.0, 0, 1.0, 0.0
    reports = attempt(trainer, [slopes(*[slope] * size) for slope in history])
    for slope, report in zip(history, reports, strict=True):
        in_float32 = row == 2
        applied = in_float32 or slope == 1.0
        total += size * float(np.float16(weight)) if applied else 0.0
        weight -= slope / STEEP if applied else 0.0
        row = 0 if applied else row + 1

        assert (report.in_float32, report.grads_finite) == (in_float32, applied)
        assert (report.consecutive_skips, report.loss_scale) == (row, scale)
        if not applied:
            above = report.loss_scale > 1.0
            assert Cause(report.cause) is (Cause.BACKWARD if above else Cause.MODEL)
            scale = max(scale / 2, 1.0)
        elif not in_float32:
            scale *= 2
        assert trainer.weight == np.float32(weight)
        assert trainer.loss_scale == scale
    assert trainer.totals == Totals(4, {"backward": 1, "model": 4}, float32_steps=2)
    assert str(trainer.totals) == "5 skipped (1 backward, 4 model), 2 in float32"
    if kind is WithAux:
        assert float(trainer.metrics["sum"].result()) == total


class Normed(Linear):
    """BatchNorm, Dropout and momentum."""

    def build_model(self):
        """Two dense layers with BatchNorm and Dropout between them."""
        return keras.Sequential(
            [
                keras.Input([1]),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )

    def build_optimizer(self):
        """Momentum, so that there are slots."""
        return keras.optimizers.SGD(2.0**-20, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_float32_step_equals_that_of_a_float32_run(mirrored, replicas):
    """L11: the float32 step of a stuck run leaves the same weights, slots and statistics on every
    replica as the same step of a float32 run whose first step was skipped too. Dropout's mask is
    the same.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    batch = slopes(*[STEEP] * 2 * replicas)
    batch["x"] = np.linspace(-1, 1, 2 * replicas, dtype=np.float32)[:, None]
    lost = batch | {"slope": np.full_like(batch["slope"], np.nan)}
    arguments = {"strategy": strategy, "loss_scale": FLOOR, "jit_compile": False, "seed": 5}
    stuck = Normed(
        precision="mixed_float16", skips=Skips(on_stuck="float32", max_consecutive=1), **arguments
    )
    wide = Normed(precision="float32", **arguments)
    skipped, report = attempt(stuck, [batch, batch])
    not_finite, expected = attempt(wide, [lost, batch])

    assert (skipped.grads_finite, skipped.in_float32) == (False, False)
    assert not not_finite.grads_finite
    assert (report.grads_finite, report.in_float32) == (True, True)
    assert (report.loss, report.gradient_norm) == (expected.loss, expected.gradient_norm)
    for name, ours, theirs in zip(
        all_copies(stuck), all_copies(stuck).values(), all_copies(wide).values(), strict=True
    ):
        assert [copy.tobytes() for copy in ours] == [copy.tobytes() for copy in theirs], name


@pytest.mark.thorough
def test_retries_come_before_float32():
    """L11: with on_overflow="retry", every step first tries the scales down to the floor, starting
    from where one overflow left the scale. The float32 step needs no retry and moves no scale.
    """
    trainer = Steep(
        loss_scale=scaling.DynamicLossScale(8.0, min_scale=1.0),
        skips=Skips(on_overflow="retry", on_stuck="float32", max_consecutive=2),
        **HALF,
    )
    reports = list(attempt(trainer, [slopes(STEEP)] * 4))

    assert [report.retries for report in reports] == [3, 2, 0, 1]
    assert [report.in_float32 for report in reports] == [False, False, True, False]
    assert [report.grads_finite for report in reports] == [False, False, True, False]
    assert trainer.totals == Totals(1, {"model": 3}, retries=6, float32_steps=1)
    assert trainer.loss_scale == 1.0


def test_a_module_cannot_be_computed_in_float32():
    """L11: a tf.Module casts by itself, so on_stuck="float32" is refused before the first step."""
    trainer = Three(skips=Skips(on_stuck="float32"), verbose=False)
    with pytest.raises(ValueError, match="`on_stuck` must"):
        list(attempt(trainer, [poison()]))


@pytest.mark.parametrize("name", ["global_clipnorm", "clipnorm", "clipvalue"])
@pytest.mark.parametrize("bound", [0, -1.0, 1e39, 1e-50, np.inf, np.nan, True, "1"])
def test_a_bound_must_be_one_of_float32(name, bound):
    """The error names the bound."""
    with pytest.raises(ValueError, match=f"`{name}` must"):
        Updates(**{name: bound})


def test_the_bound_that_is_set():
    """There is at most one, and by default none."""
    assert Updates(clipnorm=2.0).bounds == {"clipnorm": 2.0}
    assert Updates().bounds == {}


@pytest.mark.parametrize(
    ("group", "name", "arguments"),
    [
        *[(Skips, "on_overflow", {"on_overflow": value}) for value in ("retri", None)],
        (Skips, "on_nonfinite_loss", {"on_nonfinite_loss": "retry"}),
        (Skips, "on_stuck", {"on_stuck": "float16"}),
        *[(Skips, "max_retries", {"max_retries": value}) for value in (0, True)],
        (Skips, "max_consecutive", {"max_consecutive": 2.0}),
        (Skips, "max_records", {"max_records": -1}),
        (Updates, "global_clipnorm", {"global_clipnorm": 1.0, "clipnorm": 1.0}),
        *[(Updates, "ema_momentum", {"ema_momentum": value}) for value in (0.0, 1.0, "0.9", True)],
        (
            Updates,
            "updates_per_step",
            {"alternate_optimizers": True, "updates_per_step": {"critic": 0}},
        ),
        (Updates, "updates_per_step", {"updates_per_step": {"critic": 5}}),
        (Updates, "reduce_dtype", {"reduce_dtype": "float8"}),
        (Updates, "reduce_bucket_bytes", {"reduce_bucket_bytes": 0}),
    ],
)
def test_values_that_cannot_be_used_are_refused(group, name, arguments):
    """The error names the field."""
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        group(**arguments)

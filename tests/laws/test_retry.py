"""L6 and L10: an overflow is retried within the same step and leaves no other trace."""

import access
import everything
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from everything import moved
from helpers import Linear, attempt, copies, reset_step_count, slopes
from hypothesis import given, settings
from hypothesis import strategies as st

import scaling
from scaling import Cause
from trainer import Skips, Totals

pytestmark = [pytest.mark.sampled, pytest.mark.replicas(3)]

HALF = {"precision": "mixed_float16", "jit_compile": False}
LARGEST = float(np.finfo(np.float32).max)
# The scale is so high that a gradient can overflow when scaled and still have a finite square. It
# grows within a few steps, so that the tests see the rule's whole state.
RULE = scaling.DynamicLossScale(2.0**120, max_scale=2.0**126, growth_interval=3)
MAX_RETRIES = 5
OVERFLOWS = [1, MAX_RETRIES]


class Everything(everything.Everything):
    """It draws numbers that the losses depend on."""

    noise = 0.25

    def __init__(self, optimizer_name, on_overflow="retry", **arguments):
        """Sets the rule."""
        skips = Skips(on_overflow=on_overflow, max_retries=MAX_RETRIES)
        super().__init__(optimizer_name, loss_scale=RULE, skips=skips, seed=0, **arguments)

    def bits(self):
        """The bytes of every copy of all variables by place and name, and of the rule's state."""
        state = access.state(self).loss_scaler.state._asdict()
        scale = {f"state {name}": value.numpy().tobytes() for name, value in state.items()}
        return scale | everything.bits(self.moving())

    def start_over(self, values, state):
        """Restores every copy, resets the step count and sets the rule's state."""
        everything.restore(self.moving(), values)
        access.state(self).loss_scaler.assign(state)
        reset_step_count(access.state(self))

    def run(self, batches):
        """Runs one step per batch; yields its report without the step number, and the bits after
        it.
        """
        for report in attempt(self, batches):
            yield report._replace(step=0), self.bits()


def overflowing(times, place, replica=0, replicas=1):
    """A batch that overflows at the first scale of `RULE` and at its next `times - 1` halvings."""
    batch = everything.batch(seed=7)
    if place == "backward":
        batch["gradient"][replica * everything.EXAMPLES // replicas] = everything.EXAMPLES
    else:
        batch["gradient"][:] = 1.0
    # `compute_loss` multiplies the gradient by 0.75 to 1.25, so 0.72 times the largest float32 fits
    # and twice that overflows.
    batch["gradient"] *= np.float32(0.72 * 2.0**times * LARGEST / RULE.initial_scale)
    return batch


def after_overflows(times):
    """The state of `RULE` after `times` overflows."""
    state = RULE.initial_state()
    for _ in range(times):
        state = RULE.advance(state, verdict=False)
    return state


@pytest.fixture(scope="module")
def runs(mirrored):
    """Trainers with their initial values, each built and traced once."""
    made = {}

    def of(replicas, optimizer="adamw", on_overflow="retry"):
        key = replicas, optimizer, on_overflow
        if key not in made:
            strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
            trainer = Everything(optimizer, on_overflow, strategy=strategy)
            # One applied step, so that no slot or average is still 0.
            [report] = attempt(trainer, [everything.batch(seed=9)])
            assert report.grads_finite
            made[key] = trainer, [copies(variable) for variable in trainer.moving()]
        return made[key]

    return of


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "optimizer", "times", "place", "replica"),
    [
        *[(1, "adamw", k, "backward", 0) for k in OVERFLOWS],
        *[(2, "momentum", k, "backward", 1) for k in OVERFLOWS],
        *[(3, "adamw", k, "backward", 2) for k in OVERFLOWS],
        *[(3, "adamw", k, "reduction", -1) for k in OVERFLOWS],
        (2, "momentum", 1, "reduction", -1),
        (3, "adamw", 3, "backward", 1),
    ],
)
def test_a_retried_step_is_as_if_begun_at_its_last_scale(
    runs, replicas, optimizer, times, place, replica
):
    """L6: a run whose first step overflows k times, on one replica or only in the sum, has the same
    bits as a run that started in the loss-scale state that the retries reached. This holds after
    that step and after each of the next three, for weights, slots, averages, iterations, BatchNorm,
    Dropout's and the user's random numbers, spectral norms, statistics and metrics on every copy,
    and for the reports.
    """
    trainer, values = runs(replicas, optimizer)
    batches = [overflowing(times, place, replica, replicas)]
    batches += [everything.batch(seed=seed) for seed in range(3)]
    trainer.start_over(values, RULE.initial_state())
    before = trainer.bits()
    retried = list(trainer.run(batches))
    trainer.start_over(values, after_overflows(times))
    at_once = list(trainer.run(batches))

    assert [report.retries for report, _ in retried] == [times, 0, 0, 0]
    assert [report.retries for report, _ in at_once] == [0] * 4
    scale = RULE.initial_scale / 2**times
    assert [report.loss_scale for report, _ in retried] == [scale, scale, scale, 2 * scale]
    assert all(report.grads_finite for report, _ in retried)
    assert len(moved(before, retried[0][1])) > len(before) / 2
    for (report, bits), (expected_report, expected) in zip(retried, at_once, strict=True):
        assert repr(report._replace(retries=0)) == repr(expected_report)
        assert moved(expected, bits) == []


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_retried_step_is_that_of_a_run_that_never_retries(runs, replicas):
    """L6: a retried step has the bits of a trainer with on_overflow="skip", which contains no retry
    code. Its outcome at the first scale confirms that the intended cause occurred.
    """
    retrying, values = runs(replicas)
    skipping, _ = runs(replicas, on_overflow="skip")
    for place in ["backward", "reduction"][: 1 if replicas == 1 else 2]:
        batch = overflowing(1, place, replicas - 1, replicas)
        skipping.start_over(values, RULE.initial_state())
        before = skipping.bits()
        [(skipped, bits)] = skipping.run([batch])
        assert (skipped.grads_finite, skipped.retries) == (False, 0)
        assert Cause(skipped.cause) is Cause[place.upper()]
        assert moved(before, bits) == [
            "state loss_scale",
            # Without hysteresis one overflow uses up the only one allowed.
            "state overflows_left",
        ]
        reset_step_count(access.state(skipping))
        [(_, expected)] = skipping.run([batch])
        retrying.start_over(values, RULE.initial_state())
        [(report, bits)] = retrying.run([batch])

        assert (report.grads_finite, report.retries) == (True, 1)
        # Compared in order, because Keras numbers the names differently.
        assert list(expected.values()) == list(bits.values())


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_after_too_many_retries_nothing_has_moved(runs, replicas):
    """L6: a batch that still overflows after `max_retries` is skipped: everything except the loss
    scale keeps its bits on every copy, and the next batch is applied.
    """
    trainer, values = runs(replicas)
    place = "backward" if replicas == 1 else "reduction"
    trainer.start_over(values, RULE.initial_state())
    before = trainer.bits()
    batches = [overflowing(MAX_RETRIES + 1, place, 0, replicas), everything.batch()]
    (report, bits), (good, _) = trainer.run(batches)

    assert (report.grads_finite, report.retries) == (False, MAX_RETRIES)
    assert Cause(report.cause) is Cause[place.upper()]
    assert report.loss_scale == RULE.initial_scale / 2**MAX_RETRIES
    assert {name.split()[0] for name in moved(before, bits)} == {"state"}
    assert (good.grads_finite, good.retries) == (True, 0)
    assert good.loss_scale == RULE.initial_scale / 2 ** (MAX_RETRIES + 1)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("place", ["input", "loss", "unscaling"])
def test_what_no_scale_can_cure_is_not_retried(runs, replicas, place):
    """L6: a forward or unscaling cause on any replica skips the step at once, without a retry, and
    nothing moves, not even the loss-scale state.
    """
    trainer, values = runs(replicas)
    state = RULE.initial_state()._replace(loss_scale=tf.constant(2.0**15))
    trainer.start_over(values, state)
    before = trainer.bits()
    for replica in {0, replicas - 1}:
        [(report, bits)] = trainer.run([everything.batch(place, replica, replicas)])

        assert (report.grads_finite, report.retries) == (False, 0)
        assert Cause(report.cause) is (Cause.UNSCALING if place == "unscaling" else Cause.FORWARD)
        assert moved(before, bits) == []


@pytest.mark.thorough
def test_a_bad_loss_beside_an_overflow_is_not_retried(runs):
    """L6: if one replica's loss is NaN, the step is not retried, whatever the other replicas'
    gradients are, because no scale would help.
    """
    trainer, values = runs(3)
    trainer.start_over(values, RULE.initial_state())
    before = trainer.bits()
    batch = overflowing(1, "backward", 0, 3)
    batch["loss"][-1] = np.nan
    [(report, bits)] = trainer.run([batch])

    assert (report.retries, Cause(report.cause)) == (0, Cause.FORWARD)
    assert moved(before, bits) == []


class Noted(Linear):
    """Trains in float16 and records the batch and one random number of every attempt."""

    def __init__(self, **arguments):
        """Creates the generator."""
        super().__init__(verbose=False, **HALF, **arguments)
        with self.strategy.scope():
            self.generator = tf.random.Generator.from_seed(3)
        self.attempts = []

    def compute_loss(self, batch, training):
        """Records in Python while the graph runs, where no rollback can undo it."""
        losses = super().compute_loss(batch, training)
        drawn = self.generator.uniform([])
        noted = tf.numpy_function(self._note, [batch["slope"], drawn], tf.float32)
        return losses + 0.0 * tf.ensure_shape(noted, [])

    def _note(self, slope, drawn):
        self.attempts.append((*slope.tolist(), float(drawn)))
        return np.float32(0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_attempt_gets_the_same_inputs(mirrored, replicas):
    """L6: all attempts of a step see the same examples and draw the same random numbers, and the
    next step draws others.
    """
    strategy = mirrored(replicas) if replicas > 1 else "default"
    rule = scaling.DynamicLossScale(2.0**18)
    trainer = Noted(strategy=strategy, loss_scale=rule, skips=Skips(on_overflow="retry"))
    examples = [[1.0, 2.0], [4.0, 8.0]]  # times R below, because the loss is a mean over R examples
    drawn_before = set()
    for first, last in examples:
        [report] = attempt(trainer, [slopes(*[first * replicas, last * replicas][:replicas])])
        seen, trainer.attempts = trainer.attempts, []

        assert report.grads_finite
        assert report.retries > 0
        assert len(seen) == replicas * (1 + report.retries)
        assert len(set(seen)) == replicas  # each replica sees one value, repeatedly
        assert {slope for slope, _ in seen} == {first * replicas, last * replicas} or replicas == 1
        drawn = {number for _, number in seen}
        assert not drawn & drawn_before
        drawn_before |= drawn


FLOOR = {"min_scale": 2.0**4}


@pytest.mark.parametrize(
    ("rule", "retries", "last", "left"),
    [
        (scaling.DynamicLossScale(2.0**4, **FLOOR), [0, 0], 2.0**4, [2.0**4, 2.0**4]),
        (scaling.DynamicLossScale(2.0**6, **FLOOR), [2, 1], 2.0**4, [2.0**5, 2.0**4]),
        (scaling.DynamicLossScale(2.0**6, hysteresis=3, **FLOOR), [2, 2], 2.0**4, [2.0**6] * 2),
        (scaling.FixedLossScale(2.0**15), [0, 0], 2.0**15, [2.0**15] * 2),
        (scaling.NoLossScale(), [0, 0], 1.0, [1.0] * 2),
    ],
)
def test_where_no_other_scale_is_left_the_step_is_skipped(rule, retries, last, left):
    """L6: a rule at its floor, or one that never moves, is not asked for another attempt, which
    would end the same way. The scale stays where a single overflow would have put it.
    """
    trainer = Linear(loss_scale=rule, skips=Skips(on_overflow="retry"), **HALF)
    cause = Cause.MODEL if hasattr(rule, "min_scale") else Cause.BACKWARD
    for expected, scale in zip(retries, left, strict=True):
        [report] = attempt(trainer, [slopes(1e6)])

        assert (report.grads_finite, report.retries) == (False, expected)
        assert (Cause(report.cause), report.loss_scale, trainer.loss_scale) == (cause, last, scale)
        assert trainer.weight == 1.0
    assert (trainer.totals.skipped, trainer.totals.retries) == (2, sum(retries))


@pytest.mark.parametrize("max_retries", [1, 8, 9])
def test_the_number_of_retries_is_bounded(max_retries):
    """L6: from 2^24, a slope of 1 fits float16 after nine halvings (2^15). Nine retries apply the
    step; with eight it is skipped, and each retry has lowered the scale once.
    """
    trainer = Linear(
        loss_scale=scaling.DynamicLossScale(2.0**24),
        skips=Skips(on_overflow="retry", max_retries=max_retries),
        **HALF,
    )
    [report] = attempt(trainer, [slopes(1.0)])
    applied = max_retries == 9

    assert (report.grads_finite, report.retries) == (applied, max_retries)
    assert report.loss_scale == 2.0 ** (24 - max_retries)
    assert trainer.loss_scale == 2.0 ** (15 if applied else 24 - max_retries - 1)
    assert trainer.weight == (0.0 if applied else 1.0)


@pytest.mark.thorough
@pytest.mark.parametrize("refill", ["growth", "finite_step"])
@pytest.mark.parametrize("hysteresis", [1, 2, 3, 5])
def test_no_attempt_is_repeated_at_its_scale(hysteresis, refill):
    """L6: a rule with hysteresis still lowers its scale between two attempts: the number of
    attempts is the number of scales from the first to the one that fits.
    """
    rule = scaling.DynamicLossScale(2.0**20, hysteresis=hysteresis, hysteresis_refill=refill)
    trainer = Noted(loss_scale=rule, skips=Skips(on_overflow="retry"))
    slopes_and_scales = [(1.0, 2.0**15), (2.0, 2.0**14), (2.0, 2.0**14), (64.0, 2.0**9)]
    scale = rule.initial_scale
    for slope, fitting in slopes_and_scales:
        [report] = attempt(trainer, [slopes(slope)])
        seen, trainer.attempts = trainer.attempts, []
        scales = round(np.log2(scale / fitting)) + 1

        assert (report.grads_finite, report.loss_scale) == (True, fitting)
        assert (report.retries, len(seen)) == (scales - 1, scales)
        scale = fitting


def test_retries_are_counted_separately():
    """L10: attempted = applied + skipped counts steps, and retries are counted separately. The
    optimizer's iterations count updates, and the summary of a run reports all of them.
    """
    trainer = Linear(
        loss_scale=scaling.DynamicLossScale(2.0**18),
        skips=Skips(on_overflow="retry", max_retries=4),
        verbose=False,
        steps_per_loop=5,
        **HALF,
    )
    # 2^18 to 2^15 takes three retries, to 2^11 four more; 2^12 is skipped after five scales.
    history = [1.0, np.nan, 1.0, 16.0, 2.0**12]
    data = {"x": np.ones([5, 1, 1], np.float32), "slope": np.float32(history)[:, None]}
    summary = trainer.train(untuned(tf.data.Dataset.from_tensor_slices(data)), steps=5)
    totals = summary.totals

    assert totals == trainer.totals
    assert totals == Totals(3, {"forward": 1, "backward": 1}, retries=3 + 4 + 4)
    assert (totals.attempted, totals.applied, totals.skipped) == (5, 3, 2)
    assert int(trainer.optimizer.iterations.numpy()) == 3
    assert trainer.weight == 1.0 - 18.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("replicas", "jit_compile"), [(1, False), (3, False), (1, True), (3, True), (1, "step")]
)
def test_no_example_is_lost(mirrored, replicas, jit_compile):
    """L6: starting far too high, a pass over 12 batches whose slopes are the powers of two from
    2^-8 to 2^3 applies each exactly once: the weight is 1 minus their sum, which no other selection
    adds up to. The largest slope lowers the scale again. Without retries some batches are lost.
    """
    powers = 2.0 ** np.random.default_rng(0).permutation(np.arange(-8, 4))
    # Each replica's share of the mean is one power of two, exact in float16.
    slope = np.repeat(replicas * powers[:, None], replicas, axis=1).astype(np.float32)
    data = {"x": np.ones([len(powers), replicas, 1], np.float32), "slope": slope}
    weights, totals = {}, {}
    for on_overflow in ("retry", "skip"):
        trainer = Linear(
            strategy=mirrored(replicas) if replicas > 1 else "default",
            loss_scale=scaling.DynamicLossScale(2.0**24),
            skips=Skips(on_overflow=on_overflow),
            precision="mixed_float16",
            jit_compile=jit_compile,
            verbose=False,
            steps_per_loop=5,
        )
        trainer.train(untuned(tf.data.Dataset.from_tensor_slices(data)), epochs=1)
        weights[on_overflow], totals[on_overflow] = trainer.weight, trainer.totals

    assert weights["retry"] == 1.0 - replicas * powers.sum()
    assert (totals["retry"].attempted, totals["retry"].applied) == (12, 12)
    assert totals["retry"].retries > 0
    lost = totals["skip"].skipped
    assert lost > 0
    assert totals["skip"].retries == 0
    assert weights["skip"] > weights["retry"]


def test_skipping_is_the_default():
    """L6: by default a step attempts its batch once."""
    trainer = Linear(loss_scale=scaling.DynamicLossScale(2.0**18), **HALF)
    [report] = attempt(trainer, [slopes(1.0)])

    assert trainer.skips.on_overflow == "skip"
    assert (report.grads_finite, report.retries, report.loss_scale) == (False, 0, 2.0**18)
    assert trainer.loss_scale == 2.0**17


class Oracle:
    """The law of retries in plain Python, for `Linear` in float16 and `DynamicLossScale`."""

    def __init__(self, rule, max_retries, replicas):
        """Starts a run at weight 0."""
        self.rule, self.max_retries, self.replicas = rule, max_retries, replicas
        self.scale, self.weight = rule.initial_scale, 0.0
        self.finite_steps, self.left = 0, rule.hysteresis

    def step(self, slope):
        """Returns (applied, retries, the scale of the last attempt)."""
        retries, single = 0, None
        while True:
            used = self.scale
            if not np.isfinite(slope):
                return False, retries, used  # forward
            if abs(slope * used / self.replicas) <= 65504:
                self.weight -= slope
                self.finite()
                return True, retries, used
            if used == self.rule.min_scale:  # cause MODEL: only the first overflow counts
                if single:
                    self.scale, self.finite_steps, self.left = single
                return False, retries, used
            self.overflow()
            single = single or (self.scale, self.finite_steps, self.left)
            while self.scale == used:
                self.overflow()
            if retries == self.max_retries:
                return False, retries, used
            retries += 1

    def finite(self):
        """Advances the scale after a finite step."""
        self.finite_steps += 1
        if self.rule.hysteresis_refill == "finite_step":
            self.left = self.rule.hysteresis
        if self.finite_steps == self.rule.growth_interval:
            self.finite_steps, self.left = 0, self.rule.hysteresis
            self.scale = min(self.scale * 2, self.rule.max_scale)

    def overflow(self):
        """Advances the scale after an overflow."""
        self.finite_steps, self.left = 0, max(self.left - 1, 0)
        if self.left == 0:
            self.scale = max(self.scale / 2, self.rule.min_scale)


RULES = [
    (
        scaling.DynamicLossScale(2.0**10, growth_interval=1, max_scale=2.0**16, min_scale=2.0**-2),
        20,
    ),
    (scaling.DynamicLossScale(2.0**12, growth_interval=2, hysteresis=3, min_scale=2.0**-2), 4),
    (
        scaling.DynamicLossScale(
            2.0**12, growth_interval=3, hysteresis=2, hysteresis_refill="finite_step"
        ),
        3,
    ),
]


@pytest.fixture(scope="module")
def linear(mirrored):
    """A trainer and its oracle for each rule, retry limit and replica count, each traced once."""
    made = {}

    def of(rule, max_retries, replicas):
        key = rule, max_retries, replicas
        if key not in made:
            made[key] = Linear(
                strategy=mirrored(replicas) if replicas > 1 else "default",
                loss_scale=rule,
                skips=Skips(on_overflow="retry", max_retries=max_retries, max_consecutive=1000),
                **HALF,
            )
            list(attempt(made[key], [slopes(*[1.0] * replicas)]))
        trainer = made[key]
        trainer.model.trainable_variables[0].assign([[0.0]])
        access.state(trainer).loss_scaler.assign(rule.initial_state())
        return trainer, Oracle(rule, max_retries, replicas)

    return of


HISTORIES = st.lists(
    st.sampled_from([1.0, -2.0, 3.0, 2.0**8, -(2.0**12), 2.0**19, np.inf, np.nan]),
    min_size=1,
    max_size=12,
)


def check_history(trainer, oracle, history, replicas):
    """Runs both and compares them after each step."""
    before = trainer.totals
    retries = applied = 0
    reports = attempt(trainer, [slopes(*[slope] * replicas) for slope in history])
    for slope, report in zip(history, reports, strict=True):
        expected = oracle.step(slope)
        applied += expected[0]
        retries += expected[1]

        assert (report.grads_finite, report.retries, report.loss_scale) == expected
        assert (trainer.weight, trainer.loss_scale) == (oracle.weight, oracle.scale)
    assert trainer.totals.attempted - before.attempted == len(history)
    assert trainer.totals.applied - before.applied == applied
    assert trainer.totals.retries - before.retries == retries
    state = access.state(trainer).loss_scaler.state
    assert (int(state.finite_steps), int(state.overflows_left)) == (
        oracle.finite_steps,
        oracle.left,
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=25)
@given(history=HISTORIES, rule=st.sampled_from(RULES))
def test_any_history_follows_the_law(linear, replicas, history, rule):
    """L6: over any history of slopes that fit at once, at a smaller scale or at none, and of bad
    losses, the weight, the scale of each last attempt, the number of retries and the rule's state
    are those of the law in plain Python.
    """
    trainer, oracle = linear(*rule, replicas)
    check_history(trainer, oracle, history, replicas)


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_batch_that_no_scale_helps_costs_no_backoff(mirrored, replicas):
    """L17: a derivative that is NaN at every scale is attributed to the model at once, without a
    retry, and the scale stays where it was.
    """

    class Rooted(Linear):
        def compute_loss(self, batch, training):
            return tf.sqrt((super().compute_loss(batch, training) - 1.0) ** 2)

    trainer = Rooted(
        strategy=mirrored(replicas) if replicas > 1 else "default",
        loss_scale=scaling.DynamicLossScale(),
        skips=Skips(on_overflow="retry"),
    )
    [report] = attempt(trainer, [slopes(*[1.0] * replicas)])

    assert (scaling.Cause(report.cause).name, report.retries) == ("MODEL", 0)
    assert trainer.loss_scale == 2.0**15

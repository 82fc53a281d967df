"""L6 for comparison: what a poisoned step leaves behind under Keras's own loss scaling."""

from importlib.metadata import version
from pathlib import Path

import access
import everything
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import copies

pytestmark = pytest.mark.sampled

PAGE = Path(__file__).parents[2] / "docs" / "skipped-steps.md"
TITLES = {"momentum": "SGD with momentum", "adamw": "AdamW with a schedule and EMA"}
REPLICAS = [1, 2, 3]
SCALE = 2.0**15


class Incumbent:
    """The usual custom step of Keras 3, with the model and the optimizers of our own L6 matrix."""

    def __init__(self, optimizer_name, strategy):
        """Builds everything in scope, takes one good step, and stores every copy."""
        self.strategy = strategy
        with strategy.scope():
            self.model = everything.build_model()
            inner = everything.build_optimizer(optimizer_name)
            self.optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()
        self.step = tf.function(lambda batch: strategy.run(self.replica_step, (batch,)))
        self.step(everything.batch(replicas=strategy.num_replicas_in_sync))
        self.good = self.snapshot()

    def replica_step(self, batch):
        """Computes one replica's share of the mean loss, and updates the metric and the weights."""
        replicas = self.strategy.num_replicas_in_sync
        examples = everything.EXAMPLES // replicas
        start = tf.distribute.get_replica_context().replica_id_in_sync_group * examples
        batch = {name: values[start : start + examples] for name, values in batch.items()}
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            losses = everything.losses(self.model, batch)
            loss = tf.reduce_sum(losses) / everything.EXAMPLES
            self.metric.update_state(loss * replicas, sample_weight=examples)
            scaled_loss = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled_loss, weights), weights)

    def groups(self):
        """Every variable a step could move, by group, except those of the loss scale and the
        learning rate.
        """
        spectral, norm, own, dropout, _ = self.model.layers
        inner = self.optimizer.inner_optimizer
        averages = [average for _, average in access.averages_of(inner)]
        no_slots = {id(inner.iterations), id(inner._learning_rate), *map(id, averages)}
        weights = self.model.trainable_variables
        return {
            "weights": [weight for weight in weights if weight is not spectral.kernel],
            "slots": [slot for slot in inner.variables if id(slot) not in no_slots],
            "iterations": [inner.iterations],
            "EMA": averages,
            "BatchNorm": norm.non_trainable_variables,
            "Dropout": [dropout.seed_generator.state],
            "spectral norm": [spectral.vector_u, spectral.kernel],
            "own average": [own.average, own.raw, own.calls],
            "mean-aggregated": [own.mean],
            "metrics": self.metric.variables,
        }

    def snapshot(self):
        """Every copy of every variable, by group."""
        return {
            group: [copies(variable) for variable in variables]
            for group, variables in self.groups().items()
            if variables
        }

    def restore(self):
        """Restores the state after the good step, copy by copy."""
        for group, values in self.good.items():
            everything.restore(self.groups()[group], values)
        self.optimizer.dynamic_scale.assign(SCALE)
        for group, found in outcomes(self.good, self.snapshot()).items():
            assert set(found) == {"kept"}, group

    def second_step(self, batch):
        """What a step after the good one does to the loss scale, and to each variable by group."""
        self.restore()
        self.step(batch)
        scales = {copy.item() for copy in copies(self.optimizer.dynamic_scale)}
        scale = {(SCALE,): "kept", (SCALE / 2,): "halved"}[tuple(scales)]
        return {"loss scale": [scale], **outcomes(self.good, self.snapshot())}

    def poison(self, poison, replica):
        """The worst outcome in each group after a poisoned step that follows the good one."""
        replicas = self.strategy.num_replicas_in_sync
        found = self.second_step(everything.batch(poison, replica, replicas, 1, SCALE))
        [scale] = found.pop("loss scale")
        return {"loss scale": scale, **{group: worst(each) for group, each in found.items()}}


def worst(found):
    """The worst of several outcomes: a group counts as its worst variable, a variable as its worst
    copy.
    """
    return max(found, key=["kept", "moved", "inf/NaN"].index)


def outcomes(before, after):
    """The outcome for each variable, by group."""
    return {
        group: [
            worst([outcome(*pair) for pair in zip(olds, news, strict=True)])
            for olds, news in zip(values, after[group], strict=True)
        ]
        for group, values in before.items()
    }


def outcome(old, new):
    """The outcome for one copy."""
    if not np.isfinite(new).all():
        return "inf/NaN"
    return "kept" if old.tobytes() == new.tobytes() else "moved"


def cases(poison):
    """Yields the number of replicas, which one is poisoned, and its index. An overflowing sum has
    no single bad replica.
    """
    for replicas in REPLICAS:
        if poison == "reduction":
            if replicas > 1:
                yield replicas, "sum", 0
            continue
        yield replicas, "first", 0
        if replicas > 1:
            yield replicas, "last", replicas - 1


def table(found):
    """A Markdown table: cases of one poison with the same outcome share a row."""
    columns = list(next(iter(found.values())))
    lines = [["poison", "replica", *columns], ["---"] * (len(columns) + 2)]
    for poison in everything.PLACES:
        alike = {}
        for case in cases(poison):
            alike.setdefault(tuple(found[poison, case].values()), []).append(case)
        lines += [[poison, describe(poison, same), *cells] for cells, same in alike.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def describe(poison, same):
    """Names the cases of one row, such as `first of 1, 2, 3`."""
    places = {}
    for replicas, place, _ in same:
        places.setdefault(place, []).append(str(replicas))
    if len(places) > 1 and same == list(cases(poison)):
        return f"first or last of {', '.join(map(str, REPLICAS))}"
    return "; ".join(f"{place} of {', '.join(of)}" for place, of in places.items())


@pytest.fixture(scope="module")
def incumbents(mirrored):
    """Keras's steps, each built and traced once per optimizer and number of replicas."""
    made = {}

    def of(optimizer, replicas):
        key = optimizer, replicas
        if key not in made:
            strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
            made[key] = Incumbent(optimizer, strategy)
        return made[key]

    return of


@pytest.mark.slow
def test_what_keras_leaves_behind(incumbents):
    """L6, the other side: the poisons and replicas of `test_transaction`, under Keras's
    LossScaleOptimizer. The tables on the page are exactly what is found here; where they are not,
    the message holds the text to paste between the page's two markers.
    """
    versions = {name: ".".join(version(name).split(".")[:2]) for name in ("tensorflow", "keras")}
    blocks = [f"Measured with TensorFlow {versions['tensorflow']} and Keras {versions['keras']}."]
    for optimizer, title in TITLES.items():
        found = {
            (poison, case): incumbents(optimizer, case[0]).poison(poison, case[2])
            for poison in everything.PLACES
            for case in cases(poison)
        }
        blocks += [f"### {title}", table(found)]
    expected = "\n\n".join(blocks)
    written = PAGE.read_text(encoding="utf-8").split("<!-- matrix -->")[1]
    written = written.split("<!-- /matrix -->")[0].strip()

    assert written == expected, f"{PAGE.name} should say between its markers:\n\n{expected}\n"


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", everything.OPTIMIZERS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_the_page_says_of_single_variables(incumbents, optimizer, replicas):
    """L6, the other side: a step that Keras skips still changes a trainable weight, the kernel under
    SpectralNormalization. A gradient whose square overflows, or whose sum would at the loss scale,
    leaves AdamW's second moment inf, and with momentum a huge weight.
    """
    run = incumbents(optimizer, replicas)
    kernel, bias = run.model.layers[0].kernel, run.model.trainable_variables[-1]
    run.restore()
    before = copies(kernel)

    assert run.poison("backward", 0)["iterations"] == "kept"
    assert all(outcome(*pair) == "moved" for pair in zip(before, copies(kernel), strict=True))
    for poison in ["unscaling", "reduction"] if replicas > 1 else ["unscaling"]:
        run.poison(poison, 0)
        inf = [slot.path for slot in run.groups()["slots"] if np.isinf(copies(slot)).any()]
        largest = np.max(np.abs(copies(bias)))

        assert np.isfinite(largest)
        if optimizer == "adamw":
            assert [path.split("_")[-2:] for path in inf] == [["bias", "velocity"]]
        else:
            assert inf == []
            assert largest > 1e20

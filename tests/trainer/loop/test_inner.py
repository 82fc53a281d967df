"""The inner loop: how often the host calls it, how often it is traced, and what the graph holds."""

import pathlib

import access
import keras
import numpy as np
import pytest
import tensorflow as tf
from access import untuned
from helpers import Linear, all_copies, assert_same_bits, attempt, printed, slopes

from trainer import Trainer
from trainer.loop.inner import next_multiple

pytestmark = pytest.mark.sampled


def data(examples=10, global_batch=4):
    """Returns a data set whose last batch is short."""
    arrays = {"x": np.ones([examples, 1], np.float32), "slope": np.ones(examples, np.float32)}
    return untuned(tf.data.Dataset.from_tensor_slices(arrays).batch(global_batch))


def operations(concrete):
    """Lists (type, enum of dtype T) of every operation in a concrete function and in its callees."""
    graph = concrete.graph.as_graph_def()
    nodes = list(graph.node) + [node for f in graph.library.function for node in f.node_def]
    return [(node.op, node.attr["T"].type) for node in nodes]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_run_is_traced_once(mirrored, replicas, num_microbatches):
    """L15: across short batches, a short last loop and a second call of train, the step is traced once,
    and the user's loss once per replica. L14: with 5 steps per loop, 23 steps take 5 calls and 7 more
    take 2, all of one concrete function.
    """
    traces, calls = [], []

    class Counting(Linear):
        def compute_loss(self, batch, training):
            if not tf.executing_eagerly():  # the gradients' check, before the first step, is eager
                traces.append(training)
            return super().compute_loss(batch, training)

    strategy = mirrored(replicas) if replicas > 1 else "default"
    trainer = Counting(
        strategy=strategy, num_microbatches=num_microbatches, steps_per_loop=5, verbose=False
    )
    batches = data(16, 7)
    access.start(trainer, next(iter(batches)))
    run_steps = access.steps(trainer)

    def counted(iterator, num_steps):
        calls.append(int(num_steps))
        return run_steps(iterator, num_steps)

    counted.get_concrete_function = run_steps.get_concrete_function
    trainer._parts = trainer._parts._replace(run_steps=counted)
    trainer.train(batches, steps=23)
    trainer.train(batches, steps=30)

    assert calls == [5, 5, 5, 5, 3, 5, 2]
    assert run_steps.experimental_get_tracing_count() == 1
    assert traces == [True] * replicas
    assert trainer.totals.applied == 30


def test_the_loop_holds_no_host_callback():
    """L14: neither the traced loop nor any function that it calls runs Python code."""
    trainer = Linear()
    batches = data()
    access.start(trainer, next(iter(batches)))
    concrete = access.steps(trainer).get_concrete_function(iter(batches), tf.constant(1))
    names = {name for name, _ in operations(concrete)}

    assert "IteratorGetNext" in names
    assert not {name for name in names if "PyFunc" in name or "Host" in name or "Print" in name}


@pytest.mark.parametrize(
    "strategy", ["default", pytest.param("mirrored", marks=pytest.mark.thorough)]
)
def test_convolutions_run_in_half(strategy):
    """The traced float16 step computes the convolution and both of its gradients in float16."""
    kinds = ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"]

    def model():
        return keras.Sequential(
            [
                keras.Input([6, 6, 1]),
                keras.layers.Conv2D(2, 3),
                keras.layers.Conv2D(2, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )

    trainer = Trainer(
        model=model, optimizer="sgd", loss_fn="mse", precision="mixed_float16", strategy=strategy
    )
    batch = (tf.ones([8, 6, 6, 1]), tf.ones([8, 1]))
    batches = untuned(tf.data.Dataset.from_tensors(batch))
    access.start(trainer, batch)
    concrete = access.steps(trainer).get_concrete_function(iter(batches), tf.constant(1))
    found = [(name, dtype) for name, dtype in operations(concrete) if name in kinds]

    assert set(found) == {(kind, tf.float16.as_datatype_enum) for kind in kinds}


# tf.data warns that it still runs as a graph.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Even though the")
def test_graph_eager_and_xla_agree():
    """L15: the same steps give the same weights in a graph, eagerly and under XLA."""

    def weights(**arguments):
        trainer = Linear(num_microbatches=2, loss_scale=1024.0, **arguments)
        batches = [slopes(1.0, 2.0, 3.0), slopes(0.5, np.inf), slopes(-1.0, 4.0)]
        reports = list(attempt(trainer, batches))
        return trainer.weight, reports

    graph = weights(jit_compile=False)
    xla = weights(jit_compile=True)
    tf.config.run_functions_eagerly(True)
    try:
        eager = weights(jit_compile=False)
    finally:
        tf.config.run_functions_eagerly(False)

    assert graph[0] == xla[0] == eager[0] == 1.0 - 2.0 - 1.5
    assert repr(graph[1]) == repr(xla[1]) == repr(eager[1])


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_holds_the_whole_state(tmp_path, mirrored, replicas):
    """Weights, slots, the loss-scale state and the outcomes are restored on every replica's copy."""

    class Slots(Linear):
        def build_optimizer(self):
            return keras.optimizers.Adam(0.1)

    def make():
        strategy = mirrored(replicas) if replicas > 1 else "default"
        return Slots(model_dir=tmp_path, strategy=strategy, loss_scale="dynamic", verbose=False)

    before, after = make(), make()
    arrays = {"x": np.ones([6, 1], np.float32), "slope": np.float32([1, 2, 3, 4, 5, np.inf])}
    before.train(tf.data.Dataset.from_tensor_slices(arrays).batch(2), steps=7)
    access.start(after, tf.nest.map_structure(tf.constant, arrays))

    # Compared by position, since the first optimizer is named adam and the second adam_1.
    expected, actual = all_copies(before).values(), all_copies(after).values()
    assert_same_bits(dict(enumerate(expected)), dict(enumerate(actual)))
    assert before.totals == after.totals
    assert before.totals.skipped_by_cause == {"forward": 2}
    for old, new in zip(
        access.state(before).loss_scaler.state, access.state(after).loss_scaler.state, strict=True
    ):
        assert old.numpy() == new.numpy()


DETERMINISTIC = """
import tempfile
import keras
import numpy as np
import tensorflow as tf
import strategies
from trainer import Trainer

strategies.split_cpu(3)
keras.utils.set_random_seed(3)
tf.config.experimental.enable_op_determinism()
rng = np.random.default_rng(0)
data = rng.normal(size=[24, 8, 8, 1]).astype("float32"), rng.integers(3, size=24)


def model():
    layers = keras.layers
    return keras.Sequential([
        keras.Input([8, 8, 1]), layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
        layers.Activation("relu"), layers.Flatten(), layers.Dropout(0.5), layers.Dense(3)])


def weights(folder, strategy, stops):
    for steps in stops:
        trainer = Trainer(
            model=model, optimizer=lambda: keras.optimizers.Adam(0.01), strategy=strategy,
            loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True), seed=1,
            metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
            num_microbatches=2, model_dir=folder, verbose=False)
        trainer.train(data, steps=steps, global_batch=12, eval_data=data)
    trainer.predict(data[0], global_batch=12)
    return b"".join(variable.numpy().tobytes() for variable in trainer.model.variables)


with tempfile.TemporaryDirectory() as folder:
    whole = weights(f"{folder}/whole", "mirrored", [4])
    print(whole == weights(f"{folder}/resumed", "mirrored", [2, 4]))
"""


@pytest.mark.slow
def test_a_whole_run_under_op_determinism():
    """Under `enable_op_determinism()`, training, evaluation and prediction work. A run that was stopped
    and resumed ends with the same bits.
    """
    root = pathlib.Path(__file__).resolve().parents[3]

    assert printed(["-c", DETERMINISTIC], root, 300).split() == ["True"]


def test_nothing_is_timed_where_a_graph_may_not_read_the_clock(monkeypatch):
    """Under `enable_op_determinism()` TensorFlow refuses to read the clock; the run goes on, and its
    reports say that it waited 0 seconds.
    """
    message = "Timestamp cannot be called when determinism is enabled"

    def refused():
        raise tf.errors.FailedPreconditionError(None, None, message)

    monkeypatch.setattr(tf, "timestamp", refused)
    trainer = Linear(verbose=False)
    trainer.train(data(), steps=2)
    report, _ = access.steps(trainer)(iter(data()), tf.constant(2))

    assert trainer.totals.applied == 4
    assert report.data_wait_secs.numpy().tolist() == [0.0, 0.0]


def test_the_next_multiple_of_an_interval():
    """It is after the step, however close, and counted from where the interval begins."""
    assert [next_multiple(10, step) for step in (0, 9, 10, 11)] == [10, 10, 20, 20]
    assert [next_multiple(10, step, start=7) for step in (7, 16, 17)] == [17, 17, 27]
    assert next_multiple(None, 3) is None

"""Replays a recorded overflow, and finds the first layer with an inf or NaN.

See L18 in docs/numerics.md.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import scaling
import strategies
from scaling.base.argument_checks import shown
from trainer.base.tracking import copies_of
from trainer.data.batches import Spec
from trainer.fingerprint import Fingerprint, diff
from trainer.keras_compat import all_layers, replaced_calls
from trainer.replay.recorder import Record, Setting, write_state
from trainer.step.accumulate import microbatch_inputs
from trainer.step.attempt import attempt_step, pass_inputs, positions_by_value
from trainer.step.plan import StepPlan, UpdateGroup
from trainer.step.randomness import key_source
from trainer.step.report import StepReport, describe_skip
from trainer.step.state import TrainState
from trainer.step.types import GlobalBatchSize, PassInputs, ScaleState, StepInputs, Variable
from trainer.step.xla import WITH_PASSES


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of replaying a recorded step."""

    recorded: str  # why the step was skipped
    replayed: str  # why the replay was skipped, or "applied"
    place: str | None  # name of the first non-finite tensor at a layer, or None

    @property
    def same(self) -> bool:
        """Whether the replay had the same verdict, variable, replica and counts as the record."""
        return self.recorded == self.replayed

    def __str__(self) -> str:
        """Returns three lines for the console."""
        return (
            f"recorded: {self.recorded}\n"
            f"now:      {self.replayed}{'' if self.same else '  (a different verdict)'}\n"
            f"first:    {self.place or 'not in a layer'}"
        )


def rerun_step(
    record: Record, dataset: tf.data.Dataset, state: dict[str, np.ndarray], plan: StepPlan
) -> Replay:
    """Replays a recorded step in the model of a trainer.

    Args:
        record: the record of the step.
        dataset: a dataset of the single global batch.
        state: the recorded values of the variables.
        plan: the trainer's plan; the recorded values are assigned to its model.

    Raises:
        ValueError: if the variables of the model do not match the record.
    """
    variables = recorded_variables(plan)
    write_state(variables, state, plan.strategy)
    skips = dataclasses.replace(
        plan.skips,
        on_overflow="skip",
        on_stuck="float32" if record.in_float32 else "raise",
        max_consecutive=1,
    )
    once = dataclasses.replace(plan, skips=skips)
    with plan.strategy.scope():
        run = TrainState(plan.rule, record.random_seed)
    # Set the number of steps attempted before this one, because random numbers depend on it.
    before = tf.one_hot(scaling.Cause.NONE, len(scaling.Cause), dtype=tf.int64) * (record.step - 1)
    run.outcomes.assign(before)
    run.consecutive_skips.assign(1)  # after which a step is computed in float32, if it was then
    at_scale = plan.rule.initial_state()._replace(loss_scale=tf.constant(record.loss_scale))
    run.loss_scaler.assign(at_scale)
    report = tf.function(lambda iterator: attempt_step(next(iterator), once, run))(iter(dataset))
    replayed = StepReport(*(field.numpy() for field in report))
    write_state(variables, state, plan.strategy)  # undoes the update, if the step was applied
    numbers = dict.fromkeys(StepReport._fields, 0) | dataclasses.asdict(record)
    recorded = StepReport(**{name: numbers[name] for name in StepReport._fields})
    names = plan.variable_names
    place = first_nonfinite_place(record, dataset, at_scale, plan)
    if place is None and replayed.cause == int(scaling.Cause.BACKWARD) and record.bad_variable >= 0:
        place = f"the gradient of {names[record.bad_variable]} (those of all layers are finite)"
    return Replay(
        recorded=describe_skip(recorded, names),
        replayed="applied" if replayed.grads_finite else describe_skip(replayed, names),
        place=place,
    )


def recorded_variables(plan: StepPlan) -> list[Variable]:
    """Returns the variables that the loss reads, in the order in which a record keeps them."""
    every = [*plan.held_back, *plan.declared, *plan.updated]
    return list({id(variable): variable for variable in every}.values())


def first_nonfinite_place(
    record: Record, dataset: tf.data.Dataset, state: ScaleState, plan: StepPlan
) -> str | None:
    """Returns the name of the first non-finite layer output or gradient, or None.

    Outputs are checked in the order of the forward pass. If all are finite, gradients are checked
    in the order of the backward pass. Microbatches are checked one after the other.
    """
    if not isinstance(plan.model, keras.Layer):
        return None
    [batch] = dataset
    replica = max(record.bad_replica, 0)
    random = tf.constant([record.random_seed, record.step - 1], tf.int64)
    weights = tf.cast(plan.example_weights(batch), tf.float32)
    replicas = plan.strategy.num_replicas_in_sync
    share = strategies.take(strategies.whole(batch, weights), replica, replicas)
    inputs = StepInputs(share, GlobalBatchSize.of(weights), state, random, None)
    for number, group in enumerate(plan.turns):
        source = key_source(random, number, len(plan.turns))
        values = {
            position: copies_of(plan.held_back[int(position)], plan.strategy)[replica].read_value()
            for position in positions_by_value(plan)
        }
        shared = pass_inputs(inputs._replace(random=source), values, replica, plan)
        probed = ProbedPass(group, plan, dataset.element_spec, in_float32=record.in_float32)
        for index in range(plan.num_microbatches):
            finite = probed.run(microbatch_inputs(shared, index))
            nonfinite = np.flatnonzero(~finite.numpy())
            if nonfinite.size:
                return probed.places[int(nonfinite[0])]
    return None


class ProbedPass:
    """The forward and backward pass of one microbatch, traced as in training, with probes.

    Args:
        group: the objectives to differentiate, and their variables.
        plan: the trainer's plan.
        spec: the dataset's `element_spec`.
        in_float32: whether to compute in float32.
    """

    def __init__(self, group: UpdateGroup, plan: StepPlan, spec: Spec, *, in_float32: bool) -> None:
        """Creates the function, which `run` traces."""
        differentiate = group.differentiate_in_float32 if in_float32 else group.differentiate
        whole_batch = plan.strategy.num_replicas_in_sync * plan.num_microbatches == 1
        self.places: list[str] = []  # names of the checked tensors, in the order of computation
        self._spec = spec if whole_batch else tf.nest.map_structure(any_batch_size, spec)

        def probed(inputs: PassInputs) -> tf.Tensor:
            with probing(plan.model) as probes:
                result = differentiate.python_function(inputs)
                loss = ("the loss (all outputs of layers are finite)", result.nonfinite.loss == 0)
                checks = [*probes.forward, loss, *probes.backward]
                self.places = [place for place, _ in checks]
                return tf.stack([finite for _, finite in checks])

        self._probed = tf.function(
            probed, autograph=False, jit_compile=plan.jit_compile in WITH_PASSES or None
        )

    def run(self, inputs: PassInputs) -> tf.Tensor:
        """Returns whether the tensor at each of `places` is finite: shape (places,), bool."""
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, inputs)
        weights = any_batch_size(specs.share.weights)
        share = specs.share._replace(batch=self._spec, weights=weights)
        traced = self._probed.get_concrete_function(specs._replace(share=share))
        finite: tf.Tensor = traced(inputs)
        return finite


def any_batch_size(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Returns a spec whose first dimension is unknown, since shares can differ in size."""
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def check_replayable(recorded: Setting, ours: Setting, declared: Fingerprint) -> None:
    """Raises ValueError unless a trainer computes what a recorded step has computed.

    Another version of Keras may describe an object in another way, so then objects are not
    compared.

    Args:
        recorded: the settings in the record.
        ours: those of the trainer.
        declared: what the trainer declares of its objects.
    """
    for name, value in recorded.items():
        if name != "computation" and ours.get(name) != value:
            argument = "loss_scale" if name == "rule" else name
            here = shown(ours.get(name))
            raise ValueError(f"`{argument}` must be {value!r}, as in the recorded run; got {here}")
    was = recorded["computation"]
    differing = diff(was, declared) if was["versions.keras"] == declared["versions.keras"] else {}
    for place, (before, now) in differing.items():
        if not place.startswith("versions"):
            raise ValueError(f"`{place}` must be {before} as in the record; got {now}")


class Probes:
    """The tensors checked in one forward and backward pass, in the order of computation."""

    def __init__(self) -> None:
        """Creates empty lists of checks for the graph that is being traced."""
        self.graph = tf.compat.v1.get_default_graph()
        # The name of each checked tensor, and whether the tensor is finite: shape (), bool.
        self.forward: list[tuple[str, tf.Tensor]] = []
        self.backward: list[tuple[str, tf.Tensor]] = []

    def watch(self, tree: Any, place: str, *, backward: bool = True) -> Any:
        """Returns tensors unchanged, and records whether they and their gradients are finite.

        Args:
            tree: a structure of tensors; anything that is not a float tensor is passed through.
            place: the name under which the tensors are reported.
            backward: whether to check their gradients, too.
        """

        def identity(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                name = f"the gradient of {place}"
                self.backward.append((name, scaling.all_finite(upstream)))
                return upstream

            return tf.identity(tensor), gradient

        def check(leaf: Any) -> Any:
            floating = tf.is_tensor(leaf) and leaf.dtype.is_floating
            # A tensor in the graph of a loop inside the layer cannot be used outside that loop.
            same_graph = tf.compat.v1.get_default_graph() is self.graph
            if not (floating and same_graph):
                return leaf
            self.forward.append((place, scaling.all_finite(leaf)))
            # Another tensor would lack the Keras mask that a layer has put on this one.
            return tf.custom_gradient(identity)(leaf) if backward else leaf

        return tf.nest.map_structure(check, tree)


@contextlib.contextmanager
def probing(model: keras.Model) -> Iterator[Probes]:
    """Context manager: probes every layer that is called inside the `with` block.

    Enter the context while a function is traced, and use the probes in the same trace.
    """
    probes = Probes()
    with replaced_calls(probed_layers(model), lambda layer: probed_call(layer, probes)):
        yield probes


def probed_call(layer: keras.Layer, probes: Probes) -> Callable[..., Any]:
    """Returns the `call` of a layer with probes on its inputs and outputs.

    A layer that contains others may compute something itself, so its outputs are checked after
    theirs. Gradients are checked at the layers inside, which say more.
    """
    call, backward = layer.call, is_innermost(layer)

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        args = probes.watch(args, f"the input of layer {layer.name!r}", backward=backward)
        outputs = call(*args, **kwargs)
        return probes.watch(outputs, f"the output of layer {layer.name!r}", backward=backward)

    return watched


def probed_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model, and itself, but for the cells of recurrent layers.

    A cell runs inside a loop, where tensors cannot be probed.
    """
    recurrent = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.RNN)]
    cells = {id(inner) for outer in recurrent for inner in all_layers(outer)[1:]}
    return [layer for layer in all_layers(model) if id(layer) not in cells]


def is_innermost(layer: keras.Layer) -> bool:
    """Returns whether a layer is recurrent or contains no other layers."""
    return isinstance(layer, keras.layers.RNN) or len(all_layers(layer)) == 1

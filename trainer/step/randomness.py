"""Random numbers as a function of (seed, step, replica, microbatch, draw).

Keras draws from seed generators. Each one holds a key and a counter, and every draw increments the
counter. Before each forward pass, every generator is given a new key, computed from the run's
seed, the step, the replica and the microbatch. So a resumed run, a retried step and a replayed
step draw the same numbers, while replicas and microbatches draw different ones. No generator state
has to be saved or rolled back.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.base.tracking import tracked
from trainer.step.held_back import is_seed_state
from trainer.step.types import Model


def key_source(random: tf.Tensor, group: int, num_groups: int) -> tf.Tensor:
    """Returns the source of one update group's keys, for `make_keys`: shape (2,), int64.

    Args:
        random: the run's seed, and the number of steps before this one: shape (2,), int64.
        group: index of the update group in the step.
        num_groups: number of update groups in a step.
    """
    return tf.stack([random[0], random[1] * num_groups + group])


def make_keys(
    source: tf.Tensor,
    replica: int | tf.Tensor,
    num_replicas: int,
    num_microbatches: int,
    generators: int,
) -> tf.Tensor:
    """Returns a key for each generator in each of a replica's microbatches.

    Call it outside of XLA-compiled code, because XLA would generate different numbers.

    Args:
        source: the result of `key_source`: shape (2,), int64.
        replica: index of the replica.
        num_replicas: number of replicas.
        num_microbatches: number of microbatches of each replica.
        generators: number of generators that the forward pass may draw from.

    Returns:
        Shape (num_microbatches, generators, 2), int64, in [0, 2^62). The keys themselves are
        random: a generator counts up from its key, so with neighboring keys two generators would
        soon draw the same numbers.
    """
    if not generators:  # the operations below would be traced for nothing
        return tf.zeros([num_microbatches, 0, 2], tf.int64)
    place = source[1] * num_replicas + tf.cast(replica, tf.int64)
    return tf.random.stateless_uniform(
        [num_microbatches, generators, 2],
        seed=tf.stack([source[0], place]),
        maxval=2**62,
        dtype=tf.int64,
        alg="philox",
    )


def seed_states(model: Model, others: Sequence[Any] = ()) -> list[keras.Variable]:
    """Returns the states of all seed generators that a loss may draw from, without repetition.

    Args:
        model: a `keras.Model` or a `tf.Module`.
        others: other objects that the loss may use; see `tracked`.
    """
    states = []
    for item in tracked(model, *others):
        if isinstance(item, keras.Layer):
            # Keys are handed out in this order, so it is that of the layers in the model.
            states += [variable for variable in item.variables if is_seed_state(variable)]
        elif isinstance(item, keras.random.SeedGenerator):
            states.append(item.state)
    return list({id(state): state for state in states}.values())


# Graphs without stateful random ops: calls of `train` with few steps would search them each time.
CHECKED: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def check_no_stateful_ops(graph: tf.Graph) -> None:
    """Raises ValueError if a step's random numbers depend on how often the step was called.

    Args:
        graph: the graph of the traced step; its inner functions are searched too, once.
    """
    if graph in CHECKED:
        return
    definition = graph.as_graph_def()
    inner = [node for function in definition.library.function for node in function.node_def]
    for node in [*definition.node, *inner]:
        # Stateful random ops have two seeds as attributes and keep a counter. Two kinds of ops
        # have these attributes but draw nothing: cuDNN's, whose seeds are for a dropout inside the
        # kernel that Keras does not use, and ComputeAccidentalHits, which compares samples.
        if "seed2" in node.attr and not node.op.startswith(("Cudnn", "ComputeAccidentalHits")):
            raise ValueError(
                "`train_step` must draw random numbers from seed generators; got the stateful op "
                f"{node.op} at {node.name!r}. A stateful op would draw different numbers after a "
                "restart and in a retried step. Pass a keras.random.SeedGenerator as seed= to "
                "keras.random, or use a tf.random.Generator; create the generator together with "
                "the model."
            )
    CHECKED.add(graph)

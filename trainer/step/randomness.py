"""Random numbers as a function of (seed, step, replica, microbatch, draw), with no state to lose.

Keras draws from seed generators: each holds a key and a count, and every draw counts one
on. Before each forward pass every generator is given a key of its own, made from the run's
seed, the step, the replica and the microbatch. So a run that is taken up again, a step that
is attempted again and a step that is replayed see the same numbers; replicas and
microbatches see different ones; and there is nothing to save or to put back.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer.step.held_back import contents, is_seed_state


def key_source(random: tf.Tensor, phase: int, phases: int) -> tf.Tensor:
    """Returns what all keys of one phase of a step are made from: shape (2,), int64.

    Args:
        random: the run's seed, and the steps attempted before this one: shape (2,), int64.
        phase: which of the step's phases: from 0.
        phases: how many there are.
    """
    return tf.stack([random[0], random[1] * phases + phase])


def make_keys(
    source: tf.Tensor,
    replica: int | tf.Tensor,
    num_replicas: int,
    num_microbatches: int,
    generators: int,
) -> tf.Tensor:
    """Returns a key for each generator in each of a replica's microbatches.

    It is computed outside XLA, whose numbers would be others.

    Args:
        source: shape (2,), int64: see `key_source`.
        replica: which one.
        num_replicas: of how many.
        num_microbatches: of each replica.
        generators: how many generators the forward pass may draw from.

    Returns:
        Shape (num_microbatches, generators, 2), int64, in [0, 2^62). Keys are random
        themselves: a generator counts on from its key, and would soon meet another's if keys
        were neighbours.
    """
    place = source[1] * num_replicas + tf.cast(replica, tf.int64)
    return tf.random.stateless_uniform(
        [num_microbatches, generators, 2],
        seed=tf.stack([source[0], place]),
        maxval=2**62,
        dtype=tf.int64,
        alg="philox",
    )


def seed_states(model: Any, others: Sequence[Any] = ()) -> list[keras.Variable]:
    """Returns the states of all seed generators that a loss may draw from, each once.

    Args:
        model: a `keras.Model` or a `tf.Module`.
        others: what else there is: generators, layers and modules, in containers however deep.
    """
    states = []
    for leaf in contents([model, *others]):
        if isinstance(leaf, keras.Layer):
            states += [variable for variable in leaf.variables if is_seed_state(variable)]
        elif isinstance(leaf, tf.Module):
            inside = [contents(vars(inner)) for inner in (leaf, *leaf.submodules)]
            # A layer is no module, and a module's `submodules` do not look into it.
            within = [one for each in inside for one in each if not isinstance(one, tf.Module)]
            states += seed_states((), within)
        elif isinstance(leaf, keras.random.SeedGenerator):
            states.append(leaf.state)
    return list({id(state): state for state in states}.values())


def check_no_stateful_ops(graph: Any) -> None:
    """Raises ValueError if a step draws random numbers that depend on how often it was called.

    Args:
        graph: of the traced step, whose inner functions are looked at, too.
    """
    definition = graph.as_graph_def()
    inner = [node for function in definition.library.function for node in function.node_def]
    for node in [*definition.node, *inner]:
        # Such ops have two seeds as attributes, and keep a count of their own. Those of cuDNN
        # have them for a dropout inside the kernel, which Keras does not use; and the one that
        # finds equal classes among samples draws nothing.
        if "seed2" in node.attr and not node.op.startswith(("Cudnn", "ComputeAccidentalHits")):
            raise ValueError(
                "`train_step` must draw random numbers from seed generators; got the stateful op "
                f"{node.op} at {node.name!r}. It would draw other numbers after a restart, and in "
                "an attempt that is repeated. Use keras.random with seed= a "
                "keras.random.SeedGenerator, or tf.random.Generator, made where the model is."
            )

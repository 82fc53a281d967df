"""Gathers what a trainer declares, and refuses calls in which the workers of a job differ."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

import strategies
from trainer.data.batches import are_arrays
from trainer.data.iterator_state import DataPosition
from trainer.data.structures import as_arrays
from trainer.evaluation.eval_data import EvalData, is_named
from trainer.fingerprint import (
    Fingerprint,
    diff,
    digest,
    entries,
    entries_of,
    fingerprint,
    group_of,
    text_of_rule,
    texts_of_arrays,
    versions,
)
from trainer.keras_compat import MultiOptimizer
from trainer.run.parts import Parts
from trainer.run.slots import optimizers_of
from trainer.step.objective import optimizers_in

if TYPE_CHECKING:
    from trainer.trainer import Trainer

# Settings in which workers may differ, because they only say what is kept or shown.
OF_ONE_WORKER = ("max_to_keep", "trackers", "init_from")


def declared_by(trainer: "Trainer") -> Fingerprint:
    """Returns what a checkpoint records of a trainer, whose model is built.

    Call it before a checkpoint is restored: a learning rate that a hook has assigned, for example,
    belongs to the state of a run. And before the step is planned: then the trainer gives its
    `ema_momentum` to the optimizers.
    """
    settings = settings_in(trainer.updates, trainer.skips)
    settings["updates_per_step"] = {k: n for k, n in settings["updates_per_step"].items() if n > 1}
    return fingerprint(
        trainer.model,
        optimizers_at(optimizers_of(trainer)),
        trainer.precision.policy,
        precision=trainer.precision.name,
        loss_scale=text_of_rule(trainer.rule),
        loss=loss_of(trainer),
        num_microbatches=trainer.num_microbatches,
        seed=trainer.seed,
        num_replicas=trainer.strategy.num_replicas_in_sync,
        versions=versions(),
        **settings,
    )


def settings_in(*groups: Any) -> dict[str, Any]:
    """Returns the settings in groups of them, which are dataclasses, keyed by name."""
    return {
        field.name: getattr(group, field.name)
        for group in groups
        for field in dataclasses.fields(group)
    }


def optimizers_at(
    optimizers: Mapping[str, keras.optimizers.Optimizer],
) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers and those that they hold, keyed by places in a fingerprint.

    Args:
        optimizers: the optimizers, keyed by their names in a checkpoint.
    """
    found = {}
    for name, optimizer in optimizers.items():
        place = name.replace("optimizer_", "optimizer.", 1)
        held = optimizers_in(optimizer)[1:]
        if not isinstance(optimizer, MultiOptimizer):
            found[place] = optimizer
        found |= {f"{place}.inner[{at}]": one for at, one in enumerate(held)}
    return found


def loss_of(trainer: "Trainer") -> dict[str, Any]:
    """Returns what is declared of a trainer's loss."""
    loss_fn = getattr(trainer, "_loss_fn", None)
    return {"loss_fn": loss_fn, **settings_in(trainer.losses)}


def evaluation_identity(trainer: "Trainer", data: Any, found: EvalData, steps: int | None) -> str:
    """Returns what distinguishes one evaluation from another, without reading a pipeline.

    Args:
        trainer: the trainer, whose loss and metrics count.
        data: the data, or several by name. Only the values of arrays count.
        found: the same as batches.
        steps: the largest number of batches.
    """
    named = data.values() if is_named(data) else [data]
    arrays = [as_arrays(part) for part in named if are_arrays(part)]
    metrics = getattr(trainer, "_given_metrics", None)
    described = {"loss": loss_of(trainer), "metrics": metrics, "data": texts_of_arrays(arrays)}
    parts = [
        f"{name} {one.dataset.element_spec}, {one.steps_per_epoch} steps, up to {steps}"
        for name, one in found.items()
    ]
    return "; ".join([*parts, digest(json.dumps(entries_of(described), sort_keys=True))])


def declared_in_call(
    trainer: "Trainer",
    parts: Parts,
    position: DataPosition,
    request: Any,
    evaluated: EvalData,
) -> Fingerprint:
    """Returns what a call of `train` must have in common on all workers.

    Every worker takes its own share of each global batch. With other settings the workers would
    train different models, or wait for each other without end; with data that is divided between
    them they would leave out most of the examples.

    Args:
        trainer: the trainer.
        parts: its parts.
        position: the position in the training data, at which nothing has been read yet.
        request: the other arguments of the call, a `TrainRequest`.
        evaluated: the data to evaluate on.
    """
    settings = settings_in(trainer.checkpoints, trainer.monitoring) | {
        "steps_per_loop": trainer.steps_per_loop,
        "log_interval": trainer.log_interval,
        "callbacks": sorted({each.next_stop(0) or 0 for each in trainer.callbacks}),
        "on_epoch_end": trainer.overrides("on_epoch_end"),
        "model_dir": trainer.model_dir is not None,
        "steps": request.target,
        "eval_interval": request.eval_interval,
        "evaluate_at_start": request.evaluate_at_start,
    }
    data = position.declared() | entries("data.first", first_batch_of(position.data))
    ours = parts.declared | data | of_data(evaluated, "eval_data")
    return ours | entries_of({n: each for n, each in settings.items() if n not in OF_ONE_WORKER})


def of_data(data: EvalData, argument: str) -> Fingerprint:
    """Returns the entries of the data sets to evaluate, or to predict for."""
    described = {
        name: {
            "batches": int(one.dataset.cardinality()),
            "global_batch": one.global_batch,
            "spec": str(one.dataset.element_spec),
            "first": first_batch_of(one),
        }
        for name, one in data.items()
    }
    return entries(argument, described)


def first_batch_of(data: Any) -> list[str]:
    """Returns what stands for the first batch of `Batches`."""
    return texts_of_arrays(tf.nest.flatten(data.first, expand_composites=True))


def check_agreed(declare: Callable[[], Fingerprint], strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError, on every worker, if one of them declares something else than the chief.

    Args:
        declare: returns what this worker declares. It is not called without several workers.
        strategy: the strategy.
    """
    if not strategies.capabilities(strategy).multi_worker:
        return
    ours = declare()
    text = json.dumps(ours, sort_keys=True)
    number = int(digest(text), 16)
    if not strategies.any_worker(strategies.from_chief(number, strategy) != number, strategy):
        return
    found = diff(json.loads(text_from_chief(text, strategy)), ours)
    if strategies.any_worker(bool(found), strategy):
        if not found:
            raise ValueError("`Trainer` must get the same arguments and data on every worker")
        place, (chief, here) = next(iter(found.items()))
        hint = "" if "data" not in group_of(place) else ": do not divide the data between workers"
        raise ValueError(
            f"`{place}` must be the same on every worker; got {here} here, {chief} on the chief"
            f"{hint}"
        )


def text_from_chief(text: str, strategy: tf.distribute.Strategy) -> str:
    """Returns, on every worker, the chief's text."""
    count = strategies.from_chief(len(text.encode()), strategy)
    own = np.zeros(count + -count % 8, np.uint8)
    if strategies.capabilities(strategy).is_chief:
        own[:count] = np.frombuffer(text.encode(), np.uint8)

    def of_chief() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        words = tf.constant(own.view(np.int64))
        return strategies.sum_gradients(tf.where(replica == 0, words, tf.zeros_like(words)))

    words = strategy.experimental_local_results(strategy.run(of_chief))[0].numpy()
    return bytes(words.view(np.uint8)[:count]).decode()

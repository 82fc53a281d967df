"""Gathers what makes a trainer's run the same, for `run.json` and for the log."""

from typing import Any

import keras

from trainer.base.describe import describe
from trainer.checkpoint.folder import Facts
from trainer.checkpoint.run_facts import loss_facts, model_facts, optimizer_facts
from trainer.data.batches import are_arrays
from trainer.data.fingerprint import of_arrays
from trainer.data.structures import as_arrays
from trainer.evaluation.eval_data import is_named
from trainer.run.protocol import RunnableTrainer
from trainer.step.objective import optimizers_in
from trainer.step.types import MetricsByName

# Raised by one when descriptions change, so that older ones are not compared with newer ones.
VERSION = 1

# The methods of a trainer that compute a loss or an update.
METHODS = ("compute_loss", "example_weights", "train_step")


def identity_of(
    trainer: RunnableTrainer,
    optimizers: dict[str, keras.optimizers.Optimizer],
    metrics: MetricsByName,
) -> Facts:
    """Returns what makes a run the same, keyed by the names that `allow_changes` accepts.

    Call it before a checkpoint is restored. Settings that `run.json` has held for longer, such as
    the precision and the seed, are not included.

    Args:
        trainer: the trainer, whose model is built.
        optimizers: its optimizers, keyed by their names in a checkpoint.
        metrics: its training metrics.
    """
    facts = optimizer_facts(all_optimizers(optimizers))
    # It is recorded apart; the trainer sets it in the optimizers.
    if trainer.updates.ema_momentum is not None:
        for each in facts.values():
            each.pop("ema_momentum", None)
    return {
        "version": VERSION,
        "model": model_facts(trainer.model, trainer.precision.policy),
        "optimizer": facts,
        "loss": loss_of(trainer),
        "global_clipnorm": trainer.updates.global_clipnorm,
        "clipnorm": trainer.updates.clipnorm,
        "clipvalue": trainer.updates.clipvalue,
        "ema_momentum": trainer.updates.ema_momentum,
        "alternate_optimizers": trainer.updates.alternate_optimizers,
        "updates_per_step": {k: n for k, n in trainer.updates.updates_per_step.items() if n > 1},
        "metrics": describe(metrics),
        **settings_for_skips(trainer),
        **settings_for_sums(trainer),
    }


def all_optimizers(
    optimizers: dict[str, keras.optimizers.Optimizer],
) -> dict[str, keras.optimizers.Optimizer]:
    """Returns the optimizers with those that they hold; in place of a `MultiOptimizer`, only these.

    An optimizer that holds others, as Lookahead does, comes before them.
    """
    found = {}
    for name, optimizer in optimizers.items():
        held = optimizers_in(optimizer)[1:]
        if not isinstance(optimizer, keras.optimizers.MultiOptimizer):
            found[name] = optimizer
        found |= {f"{name}.{place}": one for place, one in enumerate(held)}
    return found


def loss_of(trainer: RunnableTrainer) -> Facts:
    """Returns what a trainer's loss is computed from."""
    methods = {name: getattr(trainer, name) for name in METHODS}
    facts = loss_facts(getattr(trainer, "_loss_fn", None), methods)
    if class_weight := getattr(trainer, "_class_weight", None):  # older records do not have it
        facts = facts | {"class_weight": {str(key): class_weight[key] for key in class_weight}}
    if trainer.losses.reduction != "mean":  # older records do not have it
        facts = facts | {"reduction": trainer.losses.reduction}
    return facts


def evaluated_of(trainer: RunnableTrainer, data: Any) -> Facts:
    """Returns what results of evaluations depend on besides the weights, as far as it is known.

    Args:
        trainer: the trainer.
        data: the data, or several by name. Only arrays are described.
    """
    parts = data.values() if is_named(data) else [data]
    arrays = [as_arrays(part) for part in parts if are_arrays(part)]
    return {
        "loss": loss_of(trainer),
        "metrics": describe(getattr(trainer, "_given_metrics", None)),
        "arrays": [rounded(each) for each in of_arrays(arrays)],
    }


def rounded(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of a fingerprint whose numbers do not depend on the order of a sum."""
    return {name: f"{x:.6g}" if isinstance(x, float) else x for name, x in entry.items()}


def settings_for_sums(trainer: RunnableTrainer) -> dict[str, Any]:
    """Returns how gradients are summed over replicas; nothing for one replica."""
    if trainer.strategy.num_replicas_in_sync == 1:
        return {}
    return {
        "reduce_dtype": trainer.updates.reduce_dtype or "float32",
        "reduce_bucket_bytes": trainer.updates.reduce_bucket_bytes or 0,
    }


def settings_for_skips(trainer: RunnableTrainer) -> dict[str, Any]:
    """Returns the settings that only matter for steps that are skipped."""
    policy = trainer.skips
    return {
        "on_overflow": policy.on_overflow,
        "max_retries": policy.max_retries,
        "on_nonfinite_loss": policy.on_nonfinite_loss,
        "max_consecutive": policy.max_consecutive,
        "on_stuck": policy.on_stuck,
        "attribute_causes": policy.attribute_causes,
    }

"""Refuses calls to which the workers of a job bring different settings or data.

Every worker builds its own trainer and reads its own data, and takes its own share of each global
batch. With other settings the workers would train different models, or wait for each other without
end. With data that is divided between them, as other libraries ask for, they would leave most of
the examples out.

All of it is compared as one number. Only if that differs, entry by entry.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import strategies
from scaling.base.argument_checks import shown
from trainer.base.describe import describe
from trainer.data.fingerprint import Fingerprint, is_same, of_arrays, text_of
from trainer.data.iterator_state import DataPosition
from trainer.evaluation.eval_data import EvalData
from trainer.run.outer_loop import TrainRequest
from trainer.run.protocol import Parts, RunnableTrainer


class Entry(NamedTuple):
    """Something that must be the same on every worker."""

    value: Any  # of JSON types
    numbers: Fingerprint | None = None  # of data: what was read of it, compared up to rounding


def check_same_run(
    trainer: RunnableTrainer,
    parts: Parts,
    position: DataPosition,
    request: TrainRequest,
    evaluated: EvalData,
) -> None:
    """Raises ValueError if a call of `train` has other settings or data on another worker.

    With a single worker, nothing is compared.

    Args:
        trainer: the trainer.
        parts: its parts.
        position: the position in the training data, at which nothing has been read yet.
        request: the arguments of the call.
        evaluated: the data to evaluate on.

    Raises:
        ValueError: on every worker.
    """
    if not strategies.has_workers(trainer.strategy):
        return
    settings = parts.identity | settings_of(trainer) | settings_of_call(request)
    entries = {name: Entry(value) for name, value in settings.items()}
    facts = position.facts()
    sizes = f"batches of {facts['global_batch']}, {facts['data']}{facts['pipeline']}"
    data = Entry(sizes, [*first_batch_of(position.data), *(position.content or [])])
    check_same(entries | {"train_data": data} | entries_of(evaluated, "eval_data"), trainer)


def check_same_data(
    trainer: RunnableTrainer, data: EvalData, argument: str, settings: Mapping[str, Any]
) -> None:
    """Raises ValueError if an evaluation or a prediction has other data on another worker.

    Args:
        trainer: the trainer.
        data: the data, by name.
        argument: name of the user's argument.
        settings: the other arguments of the call, by name.
    """
    if strategies.has_workers(trainer.strategy):
        entries = {name: Entry(value) for name, value in settings.items()}
        check_same(entries | entries_of(data, argument), trainer)


def settings_of(trainer: RunnableTrainer) -> dict[str, Any]:
    """Returns the settings that `identity_of` leaves out, and by which a run waits or decides."""
    config = trainer.checkpoints
    return {
        "precision": trainer.precision.name,
        "loss_scale": describe(trainer.rule),
        "seed": trainer.seed,
        "data_resume": config.data_resume,
        "num_microbatches": trainer.num_microbatches,
        "steps_per_loop": trainer.steps_per_loop,
        "log_interval": trainer.log_interval,
        "profile_steps": list(trainer.monitoring.profile_steps or []),
        "divergence": describe(trainer.monitoring.divergence),
        "actions": sorted({each.every_steps for each in trainer.actions if each.every_steps}),
        "on_epoch_end": trainer.overrides("on_epoch_end"),
        "model_dir": config.folder_in(trainer.model_dir) is not None,
        "interval": config.interval,
        "interval_secs": config.interval_secs,
        "keep_best": config.keep_best,
    }


def settings_of_call(request: TrainRequest) -> dict[str, Any]:
    """Returns the arguments of a call of `train` but for the data."""
    return {
        "steps": request.target,
        "eval_interval": request.eval_interval,
        "evaluate_at_start": request.evaluate_at_start,
    }


def entries_of(data: EvalData, argument: str) -> dict[str, Entry]:
    """Returns the entry of the data sets to evaluate, or to predict for."""
    sizes = [
        f"{name} {int(one.dataset.cardinality())} batches of {one.global_batch}, "
        f"{one.dataset.element_spec}".lstrip()
        for name, one in data.items()
    ]
    firsts = [each for one in data.values() for each in first_batch_of(one)]
    return {argument: Entry("; ".join(sizes), firsts)}


def first_batch_of(data: Any) -> Fingerprint:
    """Returns the fingerprint of the first batch of `Batches`."""
    return of_arrays(tf.nest.flatten(data.first, expand_composites=True))


def check_same(entries: Mapping[str, Entry], trainer: RunnableTrainer) -> None:
    """Raises ValueError, on every worker, for the first entry that differs from the chief's.

    Args:
        entries: the entries by name; every worker has the same names in the same order.
        trainer: the trainer, whose strategy has several workers.
    """
    strategy = trainer.strategy
    if not differs([*entries.items()], strategy)[1]:
        return
    for name, entry in entries.items():
        here, anywhere = differs(without_numbers(entry), strategy)
        if anywhere:
            raise different(name, entry.value, here=here, data=entry.numbers is not None)
        here, anywhere = numbers_differ(entry.numbers or [], strategy)
        if anywhere:
            read = ", ".join(text_of(each) for each in entry.numbers or [])
            raise different(name, read, here=here, data=True)


def without_numbers(entry: Entry) -> list[Any]:
    """Returns what is compared exactly."""
    return [entry.value, [(each["kind"], each.get("hash")) for each in entry.numbers or []]]


def differs(value: Any, strategy: tf.distribute.Strategy) -> tuple[bool, bool]:
    """Returns whether a value differs from the chief's on this worker, and on any worker."""
    text = json.dumps(value, sort_keys=True, default=str)
    number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    here = strategies.from_chief(number, strategy) != number
    return here, strategies.any_worker(here, strategy)


def numbers_differ(numbers: Fingerprint, strategy: tf.distribute.Strategy) -> tuple[bool, bool]:
    """Returns the same for fingerprints of the same kinds, whose sums may be rounded differently.

    Another processor rounds otherwise where it prepares the data.
    """
    here = False
    for each in numbers:
        floats = {name: x for name, x in each.items() if isinstance(x, float)}
        chief = {name: float_from_chief(x, strategy) for name, x in floats.items()}
        here |= not is_same(each | chief, each)
    return here, strategies.any_worker(here, strategy)


def float_from_chief(number: float, strategy: tf.distribute.Strategy) -> float:
    """Returns, on every worker, the chief's number."""
    # Adding 0.0 turns -0.0 into 0.0: the bits of -0.0, as an integer, are too large to be sent.
    bits = int(np.float64(number + 0.0).view(np.int64))
    return float(np.int64(strategies.from_chief(bits, strategy)).view(np.float64))


def different(name: str, value: Any, *, here: bool, data: bool) -> ValueError:
    """Returns the error for an entry that differs between workers.

    Args:
        name: name of the entry.
        value: what differs, as it is on this worker.
        here: whether it differs from the chief's on this worker.
        data: whether it describes data, and not a setting.
    """
    text = value if isinstance(value, str) and data else shown(value)
    where = "the chief" if here else "another worker"
    found = f"`{name}` must be the same on every worker; got {text}, and another on {where}. "
    if data:
        return ValueError(
            f"{found}Each replica takes its own share of every global batch. Do not divide the "
            "data between workers, as Dataset.shard does, and seed what is random in it."
        )
    return ValueError(
        f"{found}Workers take every step together. Pass the same arguments everywhere; what one "
        "worker is to do alone, do in a hook, if trainer.is_chief."
    )

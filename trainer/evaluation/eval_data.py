"""Reads the data to evaluate on: one data set, or several by name.

    trainer.train(data, steps=1000, eval_data={"clean": clean, "noisy": noisy})

gives the results "clean/loss", "noisy/loss" and so on, under these names everywhere.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from scaling.base.argument_checks import check_integer
from trainer.data.batches import Batches, are_arrays, batches, check_ends, needs_batch_size

EvalData: TypeAlias = dict[str, Batches]  # keyed by name; a single data set has the name ""


def read_eval_data(
    data: Any,
    argument: str,
    strategy: tf.distribute.Strategy,
    global_batch: int | None = None,
    *,
    limit: tuple[str, int | None] | None = None,
    like: Any = None,
    one_size: bool = False,
    whole: bool = False,
) -> EvalData:
    """Reads one data set to evaluate on, or a dict of several.

    Args:
        data: as for `batches`; or a dict of such data sets, keyed by name.
        argument: name of the user's argument, for errors.
        strategy: the strategy whose replicas will share each batch.
        global_batch: the batch size for those data sets that are arrays.
        limit: the name and value of the argument that limits the number of batches to evaluate; the
            value None reads whole data sets, which must then end.
        like: a batch of the training data, which tells a batch that is a dict from a dict of data
            sets; None if there is none.
        one_size: as for `batches`.
        whole: as for `batches`.

    Raises:
        TypeError, ValueError: if the limit is not a count, or if a data set cannot be used.
    """
    name, steps = limit or ("", None)
    if steps is not None:
        check_integer(name, steps, 1)
    named = data if is_named(data, like) else {"": data}
    found = {}
    for key, one in named.items():
        where = f"{argument}[{key!r}]" if named is data else argument
        # The batch size of training data is for arrays alone; one that a user passed is checked.
        strict = named is not data and like is None
        batch_size = global_batch if strict or needs_batch_size(one) else None
        read = batches(one, where, strategy, batch_size, one_size=one_size, whole=whole)
        if steps is None:
            check_ends(read, where, limit=name)
        else:
            # TensorFlow counts to 2^63.
            read = dataclasses.replace(read, dataset=read.dataset.take(min(steps, 2**62)))
        found[key] = read
    return found


def is_named(data: Any, like: Any = None) -> bool:
    """Returns whether data is a dict of data sets, and not one data set whose batches are dicts.

    A dict that holds a dataset or a function is a dict of data sets. So is a dict of tuples, or of
    dicts if the training data shows that these are no batches. A dict of arrays is one data set.

    Args:
        data: what a user passed.
        like: a batch of the training data; None if there is none.

    Example:
        >>> x, y = tf.ones([4, 1]), tf.ones([4])
        >>> is_named({"x": x, "y": y}), is_named({"clean": (x, y), "noisy": (x, y)})
        (False, True)
    """
    if not isinstance(data, Mapping) or not data:
        return False
    if any(not are_arrays(one) for one in data.values()):
        return True
    if isinstance(like, Mapping) and set(like) == set(data):
        return False
    kinds = (tuple,) if like is None else (tuple, Mapping)
    return all(isinstance(one, kinds) for one in data.values())


def evaluate_each(
    data: EvalData, evaluate: Callable[[tf.data.Dataset], dict[str, float] | None]
) -> dict[str, float] | None:
    """Evaluates each data set, and returns all results under their names.

    Args:
        data: the data sets.
        evaluate: evaluates one; returns None if it was stopped.

    Returns:
        The results; None if an evaluation was stopped.
    """
    results: dict[str, float] = {}
    for name, found in data.items():
        one = evaluate(found.dataset)
        if one is None:
            return None
        results |= {result_name(name, key): value for key, value in one.items()}
    return results


def result_names(data: EvalData, results: Iterable[str]) -> list[str]:
    """Returns the names under which `evaluate_each` returns the results of each data set.

    Example:
        >>> result_names({"clean": None, "noisy": None}, ["loss"])
        ['clean/loss', 'noisy/loss']
    """
    results = list(results)
    return [result_name(name, key) for name in data for key in results]


def result_name(name: str, result: str) -> str:
    """Returns the name of a result; `name` is "" for a single data set."""
    return f"{name}/{result}" if name else result


def first_batch(data: EvalData) -> Any:
    """Returns the first batch of the first data set."""
    return next(iter(data.values())).first

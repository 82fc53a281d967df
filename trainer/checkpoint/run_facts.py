"""What makes a run the same: facts about model, optimizer and loss that a checkpoint records.

Each function returns plain values for `run.json` (see `base/describe.py`). They are taken when the
run is built, before a checkpoint is restored: a learning rate that a hook has lowered, for example,
belongs to the state of a run, and not to what it is.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.base.describe import (
    Plain,
    describe,
    describe_function,
    describe_object,
    is_function,
    package_of,
    plain_attributes,
)
from trainer.checkpoint.folder import Facts
from trainer.keras_compat import (
    all_layers,
    learning_rate_setting,
    weight_decay_exclusions,
)
from trainer.step.types import Model


class Difference(NamedTuple):
    """A place at which two descriptions differ; None means that there is nothing."""

    place: str  # for example "layers[1] (Dropout).rate"
    was: Plain
    now: Plain


def model_facts(model: Model, policy: str = "float32") -> Facts:
    """Returns what a model computes, as far as it can be known, but not its weights.

    Of a Keras model these are the configurations of its layers at any depth and, for a functional
    model, what each layer is called with. A layer or a model of a user's own class also has a hash
    of its `call`, and its public attributes that are numbers or strings, as has each submodule of a
    `tf.Module`.

    Args:
        model: the model, whose variables have been created.
        policy: the dtype policy of the run. Layers with this policy have no "dtype".

    Example:
        >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dropout(0.5)])
        >>> model_facts(model)["layers"]
        [{'class': 'Dropout', 'rate': 0.5}]
    """
    if not isinstance(model, keras.Layer):
        modules = [model, *getattr(model, "submodules", ())]
        return {
            "class": type(model).__name__,
            "modules": [described(module, "__call__") for module in modules],
        }
    inner = [layer for layer in all_layers(model) if layer is not model]
    layers = [layer_facts(layer) for layer in inner if not is_input(layer)]
    facts: Facts = without_policy({**layer_facts(model), "layers": layers}, policy)
    return facts


def is_input(layer: keras.Layer) -> bool:
    """Returns whether a layer only stands for an input."""
    return isinstance(layer, keras.layers.InputLayer)


def layer_facts(layer: keras.Layer) -> Facts:
    """Returns the configuration of a layer or a model, without those of a model's layers.

    What cannot be described is left out: what is recorded of a run must not be able to end it.
    """
    facts: Facts = {"class": type(layer).__name__}
    with contextlib.suppress(Exception):  # a user's class may return anything as its configuration
        if isinstance(layer, keras.Model) and hasattr(layer, "operations"):
            facts |= {} if isinstance(layer, keras.Sequential) else graph_facts(layer)
        else:
            facts = described(layer, "call")
    facts.pop("trainable", None)
    if rule := getattr(layer, "float8_rule", None):
        facts = facts | {"float8_rule": repr(rule)}
    return facts if layer.trainable else facts | {"trainable": False}


def described(owner: Any, method: str) -> Facts:
    """Returns an object's description.

    If its class is a user's own, this includes all its plain attributes and the method's code.
    """
    function = describe_function(getattr(owner, method, None), owner=False)
    if isinstance(function, str):
        return describe_object(owner)
    # The attributes come last: Keras's automatic config of a model has defaults for arguments.
    return describe_object(owner) | plain_attributes(owner) | {method: function}


def graph_facts(model: keras.Model) -> Facts:
    """Returns what each operation of a functional model is called with.

    A tensor is written as [position of the operation that computes it, which call of the
    operation, which of its outputs].

    Raises:
        Exception: of any kind, if a subclass has a `get_config` of its own.
    """
    config = model.get_config()
    pairs = list(zip(model.operations, config["layers"], strict=True))
    places = {each["name"]: place for place, (_, each) in enumerate(pairs)}
    calls = [
        {"called with": with_places(each["inbound_nodes"], places)}
        | (
            {"class": type(operation).__name__}
            if isinstance(operation, keras.Layer)
            else describe_object(operation)  # the layers are described apart
        )
        for operation, each in pairs
        if not is_input(operation)
    ]
    return {
        "operations": describe(calls),
        "outputs": describe(with_places(config["output_layers"], places)),
    }


def with_places(value: Any, places: Mapping[str, int]) -> Any:
    """Returns part of a functional model's config with positions in place of operations' names."""
    if isinstance(value, Mapping):
        if "keras_history" in value.get("config", ()):
            return with_places(value["config"]["keras_history"], places)
        return {key: with_places(item, places) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) == 3 and isinstance(value[0], str) and value[0] in places:
        return [places[value[0]], *value[1:]]
    return [with_places(item, places) for item in value]


def without_policy(facts: Plain, policy: str) -> Plain:
    """Returns a description without the entries "dtype" that name the dtype policy of the run."""
    if isinstance(facts, list):
        return [without_policy(item, policy) for item in facts]
    if not isinstance(facts, dict):
        return facts
    kept = {key: item for key, item in facts.items() if (key, item) != ("dtype", policy)}
    return {key: without_policy(item, policy) for key, item in kept.items()}


def optimizer_facts(optimizers: Mapping[str, keras.optimizers.Optimizer]) -> Facts:
    """Returns the class and the constants of each optimizer, keyed like `optimizers`.

    Example:
        >>> optimizer_facts({"optimizer": keras.optimizers.SGD(0.1)})["optimizer"]["learning_rate"]
        0.1
    """
    return {name: facts_of_optimizer(one) for name, one in optimizers.items()}


def facts_of_optimizer(optimizer: keras.optimizers.Optimizer) -> Facts:
    """Returns the class and the constants of an optimizer and of its learning rate."""
    facts: Facts = shortest(described(optimizer, "update_step"))
    rate = learning_rate_setting(optimizer)
    if callable(rate) and not is_function(rate) and package_of(type(rate)) != "keras":
        facts = facts | {"learning_rate": shortest(described(rate, "__call__") | held_by(rate))}
    if any(excluded := weight_decay_exclusions(optimizer)):
        listed, pattern = excluded
        facts = facts | {"not decayed": [len(listed), pattern]}
    return facts


def held_by(owner: object) -> Facts:
    """Returns the descriptions of an object's public arrays, sequences, and objects of Keras."""
    held = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    kinds = (np.ndarray, list, tuple, keras.optimizers.schedules.LearningRateSchedule)
    return {name: describe(value) for name, value in held.items() if isinstance(value, kinds)}


def shortest(value: Plain) -> Plain:
    """Returns a description in which each float32 number is written as in a program, 0.1."""
    if isinstance(value, dict):
        return {key: shortest(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortest(item) for item in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def loss_facts(loss_fn: Any, methods: Mapping[str, Callable[..., Any]]) -> Facts:
    """Returns what a run's loss is computed from.

    Args:
        loss_fn: the trainer's `loss_fn`: a Keras loss, a function, or several of these; or None.
        methods: the trainer's methods that may be overridden, keyed by name. Those that are not
            overridden are left out.

    Example:
        >>> loss_facts(keras.losses.Huber(delta=2.0), {})["loss_fn"]["delta"]
        2.0
    """
    found = {name: describe_function(method) for name, method in methods.items()}
    facts: Facts = {name: each for name, each in found.items() if not isinstance(each, str)}
    return facts if loss_fn is None else {"loss_fn": describe(loss_fn), **facts}


def differences(
    was: Plain, now: Plain, ignored: Collection[str] = (), place: str = ""
) -> list[Difference]:
    """Returns where two descriptions differ, in their order.

    Args:
        was: the description in the checkpoint.
        now: the description of this run.
        ignored: keys that are not compared, at any depth.
        place: where in a longer description these two stand.

    Example:
        >>> differences({"a": [1, {"class": "B", "c": 2}]}, {"a": [1, {"class": "B", "c": 3}]})
        [Difference(place='a[1] (B).c', was=2, now=3)]
    """
    if isinstance(was, dict) and isinstance(now, dict):
        kind = now.get("class")
        if kind == was.get("class"):
            named = f"{place} ({kind})" if kind and place else place
            keys = [key for key in {**now, **was} if key not in ignored]
            return [
                each
                for key in keys
                for each in differences(
                    was.get(key), now.get(key), ignored, f"{named}.{key}" if named else str(key)
                )
            ]
        return [Difference(place, was.get("class", was), kind or now)]
    if isinstance(was, list) and isinstance(now, list):
        length = max(len(was), len(now))
        before, after = ([*side, *[None] * (length - len(side))] for side in (was, now))
        return [
            each
            for index in range(length)
            for each in differences(before[index], after[index], ignored, f"{place}[{index}]")
        ]
    return [] if was == now else [Difference(place, was, now)]

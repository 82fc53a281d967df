"""Every public callable, called with one odd argument at a time, and what became of the call.

The arguments come from the signatures, so a new argument is tried as soon as it exists. A callable
needs a valid call in `CALLS`. What an argument may be comes from its annotation, and from `RANGES`
where that says too little; a new argument of type Any needs a line there.
"""

import ast
import atexit
import collections
import contextlib
import functools
import importlib.util
import inspect
import os
import pathlib
import random
import re
import signal
import tempfile
import traceback
import typing
import warnings
from unittest import mock

import numpy as np
import tensorflow as tf
from chaos import odd_values
from chaos.odd_ranges import fits, tensor_of
from conformance import test_errors as errors
from helpers import linear_model

import scaling
import trainer
from strategies import registry
from trainer.data.structures import BatchError

SECONDS = 300  # for one call; most take less than one, on a machine that does nothing else
LONGEST = 2000  # characters of an error

# A valid call of each public callable; what a method is called on stands before its name. The call
# may go on after the callable, for arguments whose use comes later.
CALLS = {
    "scaling": {
        "DynamicLossScale": "scaling.DynamicLossScale().initial_state()",
        "DynamicLossScale.advance": "rule.advance(state, True)",
        "FixedLossScale": "scaling.FixedLossScale(8.0).initial_state()",
        "FixedLossScale.advance": "scaling.FixedLossScale(8.0).advance(fixed_state, True)",
        "GradientStats.flushed": "stats.flushed(1.0)",
        "HeadroomLossScale": "scaling.HeadroomLossScale().initial_state()",
        "HeadroomLossScale.advance": "scaling.HeadroomLossScale().advance("
        "scaling.HeadroomLossScale().initial_state(), measured)",
        "LayerwiseLossScale": "scaling.layerwise_gradients([model], batch, tf.reduce_mean, "
        "scaling.LayerwiseLossScale())",
        "LayerwiseLossScale.total_scale": "scaling.LayerwiseLossScale().total_scale("
        "batch, batch, [tf.eye(2)], 1.0)",
        "LogMaxLossScale": "scaling.LogMaxLossScale().initial_state()",
        "LogMaxLossScale.advance": "scaling.LogMaxLossScale().advance("
        "scaling.LogMaxLossScale().initial_state(), measured)",
        "LossScaler": "scaling.LossScaler(rule)",
        "LossScaler.assign": "scaler.assign(state)",
        "LossScaler.load_state_dict": "scaler.load_state_dict(scaler.state_dict())",
        "LossScaler.merge": "scaler.merge(state, state, verdict=True)",
        "LossScaler.scale": "scaler.scale(1.0)",
        "LossScaler.unscale": "scaler.unscale(gradients, token)",
        "LossScaler.prepare_update": "(scaler.unscale(gradients, token), "
        "scaler.prepare_update(True))",
        "LossScaler.update": "(scaler.unscale(gradients, token), scaler.update(True))",
        "NoLossScale.advance": "scaling.NoLossScale().advance("
        "scaling.NoLossScale().initial_state(), True)",
        "Precision": 'scaling.Precision("mixed_float16")',
        "Precision.cast_to_compute": 'scaling.Precision("mixed_float16").cast_to_compute(batch)',
        "Precision.cast_to_variable": 'scaling.Precision("float32").cast_to_variable(batch)',
        "TolerantLossScale": "scaling.TolerantLossScale().initial_state()",
        "TolerantLossScale.advance": "scaling.TolerantLossScale().advance("
        "scaling.TolerantLossScale().initial_state(), True)",
        "Verdict": "scaling.HeadroomLossScale().advance(scaling.HeadroomLossScale()"
        ".initial_state(), scaling.Verdict(tf.constant(True), max_magnitude=tf.constant(1.0)))",
        "all_finite": "scaling.all_finite(gradients)",
        "as_verdict": "scaling.as_verdict(True)",
        "coalesce": "scaling.coalesce(batch)",
        "find_cause": "scaling.find_cause(loss_finite=True, local_gradients_finite=True, "
        "summed_gradients_finite=True, unscaled_gradients_finite=True)",
        "gradient_stats": "scaling.gradient_stats(gradients, state)",
        "layerwise_gradients": "scaling.layerwise_gradients([model], batch, tf.reduce_mean)",
        "parse_rule": 'scaling.parse_rule("dynamic")',
        "preset": 'scaling.preset("pytorch")',
        "recommend": "scaling.recommend(stats)",
        "scale_loss": "scaling.scale_loss(1.0, state)",
        "unscale_gradients": "scaling.unscale_gradients(gradients, state)",
        "update_together": "(scaler.unscale(gradients, token), "
        "scaling.update_together([scaler], [True]))",
    },
    "strategies": {
        "agree": "strategies.agree(True)",
        "any_worker": "strategies.any_worker(False, mirrored)",
        "capabilities": "strategies.capabilities(mirrored)",
        "check_devices": "strategies.check_devices(mirrored)",
        "check_divisible": "strategies.check_divisible(4, 2, 2)",
        "create": 'strategies.create("default")',
        "decides_inside": "strategies.decides_inside(mirrored)",
        "exchanges_one_shape": "strategies.exchanges_one_shape(mirrored)",
        "from_chief": "strategies.from_chief(1, mirrored)",
        "has_workers": "strategies.has_workers(mirrored)",
        "is_asynchronous": "strategies.is_asynchronous(mirrored)",
        "is_chief": "strategies.is_chief(mirrored)",
        "register": 'strategies.register("mine", lambda devices: mirrored)',
        "split_cpu": "strategies.split_cpu(4)",
        "sum_gradients": "strategies.sum_gradients(gradients)",
        "take": "strategies.take(share, 0, 2)",
        "whole": "strategies.whole(batch, tf.ones([4]))",
    },
}
CALLS["scaling.float8"] = {
    "BlockScaling": "float8.BlockScaling().initial_state()",
    "BlockScaling.advance": "float8.BlockScaling().advance(float8.BlockScaling().initial_state(), 1.0)",
    "BlockScaling.amax": "float8.BlockScaling().amax(batch)",
    "BlockScaling.choose_scale": "float8.BlockScaling().choose_scale(float8.BlockScaling().initial_state(), 1.0)",
    "BlockScaling.initial_state": "float8.BlockScaling().initial_state()",
    "CurrentScaling": "float8.CurrentScaling().initial_state()",
    "CurrentScaling.advance": "float8.CurrentScaling().advance(float8.CurrentScaling().initial_state(), 1.0)",
    "CurrentScaling.amax": "float8.CurrentScaling().amax(batch)",
    "CurrentScaling.choose_scale": "float8.CurrentScaling().choose_scale(float8.CurrentScaling().initial_state(), 1.0)",
    "CurrentScaling.initial_state": "float8.CurrentScaling().initial_state()",
    "DelayedScaling": "float8.DelayedScaling().initial_state()",
    "DelayedScaling.advance": "float8.DelayedScaling().advance(float8.DelayedScaling().initial_state(), 1.0)",
    "DelayedScaling.amax": "float8.DelayedScaling().amax(batch)",
    "DelayedScaling.choose_scale": "float8.DelayedScaling().choose_scale(float8.DelayedScaling().initial_state(), 1.0)",
    "DelayedScaling.initial_state": "float8.DelayedScaling().initial_state()",
    "BlockScaling.spread": "float8.BlockScaling().spread(tf.ones([4, 1]), batch)",
    "dequantize": "float8.dequantize(batch, 1.0)",
    "losses_of_cast": 'float8.losses_of_cast(batch, 1.0, "float8_e5m2")',
    "preset": 'float8.preset("flax")',
    "quantize": 'float8.quantize(batch, 1.0, "float8_e5m2")',
}
CALLS["trainer"] = {
    "Action": "Action(print, 10)",
    "AimTracker": "AimTracker()",
    "Divergence": "Divergence(loss_above=100.0)",
    "MLflowTracker": "MLflowTracker()",
    "WandbTracker": "WandbTracker()",
    "find_batch_size": "find_batch_size(lambda parts: Trainer(), data, 4)",
    "Trainer": "Trainer()",
    "Trainer.all_gather": "started.all_gather(batch)",
    "Trainer.dry_run": "Trainer().dry_run(data, global_batch=4)",
    "Trainer.evaluate": "started.evaluate(data, global_batch=4)",
    "Trainer.evaluate_continuously": 'Trainer(model_dir="runs/new").evaluate_continuously('
    "data, global_batch=4, timeout_secs=0.1)",
    "Trainer.export": 'started.export("model.keras")',
    "Trainer.overfit_one_batch": "Trainer(check_gradients=False).overfit_one_batch("
    "data, 2, global_batch=4)",
    "Trainer.own_rows": "started.own_rows(batch)",
    "Trainer.predict": "started.predict(batch, global_batch=4)",
    "Trainer.replay": 'Trainer(precision="mixed_float16", loss_scale=2.0**24).replay(record)',
    "Trainer.train": "Trainer(check_gradients=False).train(data, 1, global_batch=4)",
    "Trainer.restore": "started.restore(data)",
    "Trainer.train_on_batch": "started.train_on_batch(data)",
    "convert_to_float8": "convert_to_float8(keras.Sequential([keras.Input([16]), "
    "keras.layers.Dense(16)]), lambda _: True)",
}
CALLS["trainer.step"] = {
    "Clip": "Clip()",
    "TrainState": "TrainState(rule)",
    "all_gather": "all_gather(batch)",
    "attempt_step": "attempt_step(batch, plan, run)",
    "own_rows": "own_rows(batch)",
    "plan_step": "plan_step()",
}
# Trackers can be made where the service's package is installed only.
SERVICES = {"AimTracker": "aim", "MLflowTracker": "mlflow", "WandbTracker": "wandb"}
MISSING = [name for name, package in SERVICES.items() if not importlib.util.find_spec(package)]
# Arguments that are not tried: what becomes of a batch is up to the function in the plan.
LEFT_OUT = {("attempt_step", "batch")}

# Other arguments that a valid call needs when this one is given, or a call for this one alone.
ALONGSIDE = {
    ("Action", "every_secs"): "Action(print, every_secs=60)",
    # Runs that would be long: one that stops after its first loop, one that another has ended.
    ("Trainer.train", "steps"): "Stopping(check_gradients=False).train(data, 1, global_batch=4)",
    ("Trainer.train", "epochs"): "Stopping(check_gradients=False).train("
    "data, epochs=1, global_batch=4)",
    ("Trainer.evaluate_continuously", "timeout_secs"): '(Trainer(model_dir="runs/new", '
    "check_gradients=False).train(data, 1, global_batch=4), "
    'Trainer(model_dir="runs/new").evaluate_continuously(data, global_batch=4))',
    **{
        ("Trainer.train", name): "Trainer(check_gradients=False).train("
        "data, 1, global_batch=4, eval_data=data)"
        for name in ("eval_interval", "eval_steps", "evaluate_at_start")
    },
    ("Divergence", "rise"): "Divergence(rise=2.0)",
    ("Trainer", "loss_weights"): 'Trainer(loss_fn={"a": "mse"})',
    ("Trainer", "updates_per_step"): "Trainer(alternate_optimizers=True)",
    ("Trainer", "init_from_skip"): 'Trainer(init_from="runs/old")',
    **{
        ("Trainer", name): 'Trainer(model_dir="runs/new")'
        for name in ("keep_best", "profile_steps", "divergence", "max_overflow_records")
    },
    ("create", "devices"): 'strategies.create("mirrored", ["CPU:0", "CPU:1"])',
}


class Place(typing.NamedTuple):
    """An argument of a public callable."""

    module: str
    name: str  # of the callable: `Class.method` for a method
    argument: str

    @property
    def parameter(self):
        """The argument in the signature."""
        return signature(self.module, self.name).parameters[self.argument]


def callable_of(module, name):
    """A public callable; of a class, what its call is passed to."""
    value, *rest = name.split(".")
    found = getattr(errors.MODULES[module][value], *rest) if rest else errors.MODULES[module][value]
    if inspect.isclass(found):
        return found.__new__ if issubclass(found, tuple) else found.__init__
    return found


def signature(module, name):
    """A callable's signature, without `self`, with types for annotations."""
    found = callable_of(module, name)
    whole = inspect.signature(found)
    kept = [
        each.replace(annotation=typing.Any) if isinstance(each.annotation, str) else each
        for each in whole.parameters.values()
        if each.name not in {"self", "_cls"}
        and each.kind not in {each.VAR_KEYWORD, each.VAR_POSITIONAL}
    ]
    return whole.replace(parameters=kept)


def places(module):
    """All arguments of a module's public callables, but those that users do not pass."""
    exempt = errors.EXEMPT
    for name in errors.ARGUMENTS[module]:
        if (name, "*") in exempt or name in MISSING:
            continue
        for argument in signature(module, name).parameters:
            if (name, argument) not in exempt and (name, argument) not in LEFT_OUT:
                yield Place(module, name, argument)


def call_of(place):
    """The code of a valid call in which the name `VALUE` stands for the argument."""
    code = ALONGSIDE.get(place[1:], CALLS[place.module][place.name])
    tree, wanted = ast.parse(code, mode="eval"), place.name.split(".")[-1]
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1]
        if called == wanted:
            break
    else:
        raise AssertionError(f"{code} does not call {wanted}")
    order = list(signature(place.module, place.name).parameters)
    value = ast.Name("VALUE", ast.Load())
    if (index := order.index(place.argument)) < len(node.args):
        node.args[index] = value
    else:
        node.keywords = [each for each in node.keywords if each.arg != place.argument]
        node.keywords.append(ast.keyword(place.argument, value))
    return ast.unparse(ast.fix_missing_locations(tree))


def names(call):
    """The names that a call uses, made anew."""
    found = errors.names_in_examples()
    if any(name in call for name in errors.TENSORS):
        found |= errors.tensors_in_examples()
    found["Stopping"] = functools.partial(
        Stopping, model=linear_model, optimizer="sgd", loss_fn="mse", verbose=False
    )
    if "record" in call:
        found["record"] = record()
    found["fixed_state"] = scaling.FixedLossScale(8.0).initial_state()
    found["measured"] = scaling.Verdict(tf.constant(True), max_magnitude=tf.constant(1.0))
    return found


class Stopping(trainer.Trainer):
    """Stops after its first loop, so that any number of steps can be asked for."""

    def on_loop_begin(self, step):
        """Asks for the end."""
        del step
        self.stop()


@functools.cache
def record():
    """The record of a skipped step, which lasts as long as the process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    run = trainer.Trainer(
        model=linear_model,
        optimizer="sgd",
        loss_fn="mse",
        verbose=False,
        precision="mixed_float16",
        loss_scale=2.0**24,
        model_dir=folder.name,
        max_overflow_records=1,
        check_gradients=False,
    )
    run.train((np.full([4, 1], 3.0), np.ones([4, 1])), 1, global_batch=4)
    [found] = pathlib.Path(folder.name, "overflows").iterdir()
    return str(found)


class TooLongError(BaseException):
    """A call did not end in time. No code that catches an Exception catches it."""


@contextlib.contextmanager
def within(seconds):
    """Raises TooLongError if the body takes longer."""

    def stop(*_):
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def elsewhere():
    """A folder to work in, and only our own strategies, so that no case meets another's."""
    built_in = {name: registry._FACTORIES[name] for name in ("default", "one_device", "mirrored")}
    with (
        mock.patch.dict(registry._FACTORIES, built_in, clear=True),
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        warnings.catch_warnings(),
        pathlib.Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        pathlib.Path("notes.txt").touch()
        yield


def outcome(place, code, go_on=""):
    """What becomes of a call with an odd value: a kind, and a text about it.

    The kinds are "clear", "documented", "obscure" and "silent".

    Args:
        place: the argument.
        code: of the value.
        go_on: what is called on the result, where a value that was accepted may still go wrong.
            Its errors may name any argument.
    """
    call, value = call_of(place) + go_on, odd_values.made(code)
    documented = fits(place, value)
    value = odd_values.made(code)  # an iterator may have been used up
    try:
        with elsewhere(), within(SECONDS):
            eval(call, names(call) | {"VALUE": value})  # noqa: S307  # a call from above
    except TooLongError:
        return "obscure", f"no end within {SECONDS} s"
    except Exception as error:  # noqa: BLE001  # all kinds are judged
        why = unclear(place, error, odd_values.made(code), any_argument=bool(go_on))
        if why and documented and callable(value) and fails_itself(call, code):
            return "documented", "the function's own error"
        return ("obscure", why) if why else ("clear", str(error))
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        return "obscure", f"{type(error).__name__}: {error}"
    return ("documented", "") if documented else ("silent", "")


def fails_itself(call, code):
    """Whether the error of a call comes out of the function that was passed, which raises it."""
    function, raised = odd_values.made(code), []

    def watched(*found, **named):
        try:
            return function(*found, **named)
        except Exception as error:
            raised.append(error)
            raise

    with contextlib.suppress(Exception), elsewhere(), within(SECONDS):
        eval(call, names(call) | {"VALUE": watched})  # noqa: S307  # a call from above
    return bool(raised)


WORDS = collections.defaultdict(set)  # other names of arguments in errors
for _name, _argument, _, _word in errors.ALL_CASES:
    WORDS[_name, _argument].add(_word)
WORDS["check_divisible", "num_replicas"] = {"global_batch"}  # which is too small for them
WORDS["check_divisible", "num_microbatches"] = {"global_batch"}


def unclear(place, error, value, *, any_argument=False):  # a reason each
    """What is not clear about an error, or ""."""
    message, kind = str(error), type(error).__name__
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{pathlib.Path(last.filename).name}:{last.lineno}"
    text = f"{kind} at {where}: {message[:300]}"
    if type(error) not in {TypeError, ValueError, RuntimeError, BatchError}:
        return text
    if not any_argument and not names_argument(place, message, value):
        return "unnamed: " + text
    if not re.match(r"`[\w.\[\]'\"()]+` must ", message):
        return "form: " + text
    if len(message) > LONGEST or re.search(r"[\x00-\x09\x0b-\x1f\ud800-\udfff]", message):
        return f"cannot be printed ({len(message)} characters): {text!r}"
    returned = callable(value) and "must return" in message  # the error is about what it returns
    return "" if returned or any_argument or shows(message, value) else "value not shown: " + text


def names_argument(place, message, value):
    """Whether an error names the argument, a part of it, or a field that a text gives."""
    words = {place.argument, place.argument.removesuffix("s"), *WORDS[place[1:]]}
    parts = {part for name in re.findall(r"`([\w.]+)", message) for part in name.split(".")}
    return bool(words & parts) or (isinstance(value, str) and any(word in value for word in parts))


def shows(message, value):
    """Whether an error tells the value, or its type, shape, dtype, size or a part."""
    told = {type(value).__name__, getattr(value, "__name__", "")}
    tensor = tensor_of(value)
    leaves = [value, tensor]
    with contextlib.suppress(Exception):
        leaves += tf.nest.flatten(value)
        leaves += list(value)
        told.add(str(len(value)))
    for leaf in leaves:
        told.add(type(leaf).__name__)
        for text in (str, repr, lambda leaf: str(np.shape(leaf)), lambda leaf: leaf.dtype.name):
            with contextlib.suppress(Exception):
                told |= {text(leaf)[:12], text(leaf)[-12:]}
    with contextlib.suppress(Exception):
        told.add(str(float(value)))
    with contextlib.suppress(Exception):
        told.add(value.name)
    told = {each for each in told if isinstance(each, str) and each}
    return any(each in message for each in told) or "got none" in message.lower()


def drawn(place, number):
    """Codes of odd values for an argument: half from the pools near its type, half from all."""
    chance = random.Random(str(place))  # noqa: S311  # a case depends on its place alone
    near = pools_for(place.parameter.annotation)
    own = list(dict.fromkeys(code for pool in near for code in odd_values.POOLS[pool]))
    chosen = chance.sample(own, min(len(own), (number + 1) // 2))
    others = [code for code in odd_values.ALL if code not in chosen]
    return chosen + chance.sample(others, min(len(others), number - len(chosen)))


def pools_for(hint):
    """The names of the pools that hold values near a type."""
    text = str(hint)
    found = {
        pool
        for pool, words in {
            "numbers": ("int", "float", "bool"),
            "strings": ("str", "Literal"),
            "paths": ("Path",),
            "collections": ("Mapping", "Sequence", "tuple", "list", "dict"),
            "callables": ("Callable",),
            "tensors": ("Tensor", "Any"),
            "objects": ("scaling", "strategies", "trainer", "keras", "Strategy"),
        }.items()
        if any(word in text for word in words)
    }
    return sorted(found) or ["objects"]

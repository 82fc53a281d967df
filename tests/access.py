"""What tests reach inside of a trainer. When an inner name moves, this file follows, and no test does."""

from trainer.checkpoint import folder
from trainer.data.batches import untuned
from trainer.step.averages import averages_of
from trainer.step.randomness import key_source, make_keys

__all__ = [
    "averages_of",
    "checkpoints",
    "current_position",
    "folder",
    "key_source",
    "make_keys",
    "metrics",
    "plan",
    "position",
    "start",
    "state",
    "steps",
    "traces",
    "untuned",
    "variables",
]


def start(trainer, batch):
    """Builds or restores a run without taking a step, as the first batch lets it."""
    return trainer._start(batch)


def state(trainer):
    """Returns the `TrainState`: the loss scale, the counts of steps and the seed."""
    return trainer._parts.state


def steps(trainer):
    """Returns the traced inner loop, a function of an iterator and the number of steps."""
    return trainer._parts.run_steps


def traces(function):
    """Returns what a `tf.function` has traced."""
    return function._list_all_concrete_functions()


def plan(trainer):
    """Returns the `StepPlan`."""
    return trainer._parts.plan


def metrics(trainer):
    """Returns the metrics of training and of evaluation."""
    return trainer._parts.metrics


def checkpoints(trainer):
    """Returns what saves and restores the run."""
    return trainer._parts.checkpoints


def position(trainer):
    """Returns the position in the data after the last call of `train`."""
    return trainer._trained_on[-1]


def current_position(trainer):
    """Returns the position in the data while `train` runs."""
    return trainer._position


def variables(trainer, *, of_metrics=True):
    """Returns the variables of a run: of its model, its optimizers, its metrics and its state."""
    optimizers = trainer.optimizer
    optimizers = optimizers.values() if isinstance(optimizers, dict) else [optimizers]
    of_training = metrics(trainer).train.values() if of_metrics else ()
    return [
        *trainer.model.variables,
        *(variable for each in (*optimizers, *of_training) for variable in each.variables),
        *state(trainer).variables,
    ]

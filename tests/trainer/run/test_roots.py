"""What a trainer reaches: its attributes, its class and its methods, but no other trainer."""

import keras
import tensorflow as tf
from helpers import Linear, slopes

from trainer.run.roots import roots_of, roots_of_run
from trainer.step.reach import reach


def test_what_a_trainer_reaches():
    """L6: attributes, class attributes and closures of methods are reached; what only builds the model,
    and another trainer, are not.
    """
    names = ["attribute", "of_class", "closure", "builder", "other"]
    made = {name: tf.Variable(0.0, name=name) for name in names}
    closure, builder = made["closure"], made["builder"]

    class Mine(Linear):
        of_class = made["of_class"]

        def build_model(self):
            assert builder is not None
            return super().build_model()

        def on_loop_end(self, step):
            closure.assign(step)

    trainer, other = Mine(verbose=False), Linear(verbose=False)
    other.kept = made["other"]
    trainer.kept = [made["attribute"], other]
    found = {item.name for _, item, _ in reach(roots_of(trainer)) if isinstance(item, tf.Variable)}

    assert found == {"attribute:0", "of_class:0", "closure:0"}


def test_the_parts_of_a_run():
    """L6: the model, the optimizer, the state of the run and all metrics are reached."""

    class WithMetric(Linear):
        def build_metrics(self):
            return {"mean": keras.metrics.Mean()}

        def update_metrics(self, batch, aux):
            self.metrics["mean"].update_state(batch["slope"])

    trainer = WithMetric(verbose=False)
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    parts = trainer._parts
    items = {id(item) for _, item, _ in reach(roots_of_run(trainer, parts))}
    wanted = [*trainer.model.variables, *trainer.optimizer.variables, parts.state.outcomes]
    wanted += [variable for each in parts.metrics for variable in each["mean"].variables]

    assert {id(variable) for variable in wanted} <= items


def test_a_checkpoint_does_not_depend_on_earlier_calls():
    """L12: after a call of `train`, nothing of that call is reached: a new process would not have it."""
    trainer = Linear(verbose=False)
    before = {path for path, _, _ in reach(roots_of(trainer))}
    trainer.train(slopes(1.0), steps=1, global_batch=1)
    trainer.train_on_batch(slopes(1.0))
    found = {path for path, item, _ in reach(roots_of(trainer)) if isinstance(item, tf.Variable)}
    assert found <= before

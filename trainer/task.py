"""What a user says about a training run: methods to override, and what they do if left alone."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainer.base.autograph import call_user, without_autograph
from trainer.config.resolve import check_optimizer_name, resolve_loss
from trainer.step.plan import ones


class Task:
    """Model, optimizer, loss and metrics. `Trainer` is a `Task` that knows how to run.

    A subclass overrides `build_model`, `build_optimizer` and `compute_loss`. Without a
    subclass, `Trainer(model=..., optimizer=..., loss_fn=...)` says the same for batches of
    the form (x, y) or (x, y, sample_weight).
    """

    model: Any

    @property
    def metrics(self) -> dict[str, keras.metrics.Metric]:
        """The metrics in use, by name; `Trainer` has them."""
        raise NotImplementedError

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        loss_fn: Any = None,
        metrics: Callable[[], dict[str, keras.metrics.Metric]] | None = None,
    ) -> None:
        """Keeps what the defaults below return."""
        if metrics is not None and not callable(metrics):
            raise TypeError(
                f"`metrics` must be a function that returns metrics by name; got "
                f"{type(metrics).__name__}. They are made in the strategy's scope, once for "
                "training and once for evaluation. Pass for instance "
                'lambda: {"accuracy": keras.metrics.Accuracy()}.'
            )
        check_given("model", model, (keras.Model, tf.Module), "a keras.Model or tf.Module")
        check_given(
            "optimizer", optimizer, (str, keras.optimizers.Optimizer), "a Keras optimizer, its name"
        )
        check_given("loss_fn", loss_fn, str, "a keras.losses.Loss, its name")
        if isinstance(optimizer, str):
            check_optimizer_name(optimizer)
        self._given_model = model
        self._given_optimizer = optimizer
        self._given_metrics = metrics
        self._loss_fn = resolve_loss(loss_fn)

    def build_model(self) -> Any:
        """Returns a new `keras.Model` or `tf.Module`.

        Called once, in the strategy's scope and under the precision's dtype policy: layers
        need no dtype of their own. A `tf.Module` casts for itself, with
        `self.precision.cast_to_compute`.
        """
        if self._given_model is None:
            raise _missing("model", "build_model")
        is_model = isinstance(self._given_model, (keras.Model, tf.Module))
        return self._given_model if is_model else self._given_model()

    def build_optimizer(self) -> Any:
        """Returns a new Keras optimizer, or several. Called once, in the strategy's scope.

        Several are a dict. Each name is an attribute of the model, whose variables that optimizer
        moves, and `compute_loss` returns losses by the same names. The step has one verdict: all
        of them move, or none.
        """
        if self._given_optimizer is None:
            raise _missing("optimizer", "build_optimizer")
        if isinstance(self._given_optimizer, str):
            return keras.optimizers.get(self._given_optimizer)
        is_optimizer = isinstance(self._given_optimizer, keras.optimizers.Optimizer)
        return self._given_optimizer if is_optimizer else self._given_optimizer()

    @without_autograph
    def compute_loss(self, batch: Any, training: bool) -> Any:
        """Returns one loss per example. Called in replica context, on this replica's examples.

        `model.losses` (regularizers, `add_loss`) are added by the trainer; leave them out.

        Args:
            batch: examples in the structure of the data; any number of them.
            training: whether to run the model as in training.

        Returns:
            losses: shape (examples,), float32, not reduced and not scaled; a dict of such if
            there are several optimizers. Or (losses, aux), where aux is any structure of
            tensors whose first dimension is the example. It is handed to `update_metrics`.
        """
        if self._loss_fn is None:
            raise _missing("loss_fn", "compute_loss")
        x, y, _ = _unpack(batch)
        predictions = self._call_model(x, training)
        predictions = tf.nest.map_structure(lambda p: tf.cast(p, tf.float32), predictions)
        if not isinstance(self._loss_fn, keras.losses.Loss):
            return call_user(self._loss_fn, y, predictions), predictions
        # `call` is the loss without its reduction, which would average over this share only.
        losses = call_user(self._loss_fn.call, y, predictions)
        return tf.reduce_mean(losses, axis=list(range(1, losses.shape.rank))), predictions

    @without_autograph
    def example_weights(self, batch: Any) -> tf.Tensor:
        """Returns the weight of each example's loss in the mean over the global batch.

        Called on the global batch. The default is ones, or the third of (x, y, sample_weight).
        A language model returns token counts; padding has weight 0. A row of weight 0 still runs
        through the model, so let padding repeat a real example: the derivative of a loss that is
        inf or NaN is NaN at any weight.

        Returns:
            Shape (examples,), float32; meant to be at least 0, which is not checked.
        """
        if self._loss_fn is not None and isinstance(batch, tuple) and len(batch) == 3:
            return batch[2]
        return ones(batch)

    def build_metrics(self) -> dict[str, keras.metrics.Metric]:
        """Returns new Keras metrics by name. Called twice: evaluation has its own."""
        return self._given_metrics() if self._given_metrics else {}

    @without_autograph
    def update_metrics(self, batch: Any, aux: Any) -> None:
        """Updates `self.metrics`. Called in replica context, on applied steps only.

        Args:
            batch: this replica's examples; there may be none.
            aux: what `compute_loss` returned for them beside the losses; () if nothing.
        """
        if self.metrics and self._loss_fn is None:
            raise ValueError(
                f"`update_metrics` must be overridden beside compute_loss; got metrics "
                f"{', '.join(self.metrics)} and no loss_fn. Nothing would ever update them. "
                "Override update_metrics(batch, aux), or leave the metrics out."
            )
        if self.metrics:
            _, y, sample_weight = _unpack(batch)
            for metric in self.metrics.values():
                call_user(metric.update_state, y, aux, sample_weight=sample_weight)

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns what else a checkpoint shall hold, by name: anything TensorFlow can track."""
        return {}

    def on_train_begin(self) -> None:
        """Called by `train` before the first step, when everything is built and restored."""

    def on_loop_begin(self, step: int) -> None:
        """Called before each inner loop; `step` steps have been taken."""

    def on_loop_end(self, step: int) -> None:
        """Called after each inner loop, its log, evaluation and actions; then it is saved."""

    def on_recovery(self, step: int, restored: int) -> None:
        """Called when a run that diverged by `step` was taken back to step `restored`."""

    def on_train_end(self, summary: Any) -> None:
        """Called by `train` with the `TrainSummary` that it is about to return."""

    @without_autograph
    def predict_batch(self, batch: Any) -> Any:
        """Returns the model's outputs for a batch. Called in replica context.

        The default hands the model the batch, or the first item of it if it is a tuple.

        Returns:
            Any structure of tensors whose first dimension is the example.
        """
        return self._call_model(batch[0] if isinstance(batch, tuple) else batch, training=False)

    def _call_model(self, x: Any, training: bool) -> Any:
        if isinstance(self.model, keras.Model):
            return call_user(self.model, x, training=training)
        return call_user(self.model, x)


def check_given(name: str, value: Any, kinds: Any, what: str) -> None:
    """Raises TypeError unless an argument is None, of some kinds, or a function."""
    if value is not None and not isinstance(value, kinds) and not callable(value):
        raise TypeError(
            f"`{name}` must be {what} or a function; got {type(value).__name__}. The trainer could "
            "do nothing with it. Pass one of these, or override the method in a subclass."
        )


def _unpack(batch: Any) -> tuple[Any, Any, Any]:
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        found = "a single tensor" if tf.is_tensor(batch) else f"a {type(batch).__name__}"
        raise ValueError(
            "`train_data` must yield (x, y) or (x, y, sample_weight) for the default compute_loss; "
            f"got {found}. It cannot tell inputs from labels. Override "
            "compute_loss(batch, training), or map the dataset to tuples."
        )
    return batch if len(batch) == 3 else (*batch, None)


def _missing(argument: str, method: str) -> ValueError:
    return ValueError(
        f"`{argument}` must be given unless {method}() is overridden; got None. The trainer needs "
        f"one or the other. Pass {argument}= or override {method}()."
    )

"""The part of a trainer that users define: model, optimizer, loss and metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer.base.argument_checks import as_python
from trainer.base.autograph import call_user, without_autograph
from trainer.callbacks.callback import check_hooks
from trainer.losses.default_batch import check_class_weight, class_factors, unpack
from trainer.losses.loss_fn import (
    example_losses,
    example_weights,
    floats_at_least_float32,
    global_loss,
    mask_of,
    takes_one_output,
)
from trainer.losses.metrics import make_metrics, update_by_output, update_metric
from trainer.losses.output_mask import makes_masks, mask_of_outputs, masked
from trainer.losses.outputs import (
    OutputLosses,
    entries_by_name,
    is_several,
    only_one,
    with_output_names,
)
from trainer.losses.settings import Losses
from trainer.losses.value_checks import Rule, label_rules
from trainer.run.resolve import resolve_loss
from trainer.step.checks import check_own_steps
from trainer.step.gather import all_gather, own_rows
from trainer.step.plan import ones
from trainer.step.types import Aux, Batch, MetricsByName, Model, Optimizers

ModelArgument: TypeAlias = Model | Callable[[], Model] | None
OptimizerArgument: TypeAlias = str | keras.optimizers.Optimizer | Callable[[], Optimizers] | None
OneLoss: TypeAlias = str | keras.losses.Loss | Callable[[Any, Any], tf.Tensor] | None
LossArgument: TypeAlias = OneLoss | Mapping[str, OneLoss] | Sequence[OneLoss]
OneMetric: TypeAlias = str | keras.metrics.Metric | Callable[[Any, Any], tf.Tensor]
MetricsArgument: TypeAlias = (
    Callable[[], MetricsByName]
    | Sequence[OneMetric]
    | Mapping[str, OneMetric | Sequence[OneMetric]]
    | Sequence[OneMetric | Sequence[OneMetric] | None]
    | None
)


class Task:
    """Model, optimizer, loss and metrics. `Trainer` is a `Task` that can also train and evaluate.

    A subclass overrides `build_model`, `build_optimizer` and `compute_loss`. Without a
    subclass, `Trainer(model=..., optimizer=..., loss_fn=...)` is enough for batches of the
    form (x, y) or (x, y, sample_weight).
    """

    @property
    def model(self) -> Model:
        """The model, which `Trainer` builds."""
        raise NotImplementedError

    @property
    def metrics(self) -> MetricsByName:
        """The metrics in use, keyed by name; defined by `Trainer`."""
        raise NotImplementedError

    def __init__(
        self,
        model: ModelArgument = None,
        optimizer: OptimizerArgument = None,
        loss_fn: LossArgument = None,
        metrics: MetricsArgument = None,
        losses: Losses = Losses(),
    ) -> None:
        """Checks and stores the arguments, which the default methods use."""
        check_hooks(type(self))
        self._given_model = model
        self._given_optimizer = optimizer
        overridden = type(self).build_optimizer is not Task.build_optimizer
        # A subclass may have assigned `self.optimizer` before it calls this constructor.
        self.has_optimizer = optimizer is not None or overridden or "optimizer" in vars(self)
        self._given_metrics = metrics
        self._inputs: Any = None  # specs of what the model was called with
        if losses.weights is not None and not is_several(loss_fn):
            raise ValueError("`weights` must be None unless `loss_fn` has a loss for each output")
        own_loss = type(self).compute_loss is not Task.compute_loss
        check_class_weight(losses.class_weight, loss_fn, losses.reduction, overridden=own_loss)
        self._loss_fn = resolve_loss(loss_fn, losses.reduction, losses.weights)
        self._class_weight = {
            as_python(label): as_python(weight)
            for label, weight in (losses.class_weight or {}).items()
        }
        self.losses = losses
        self.weights_overridden = type(self).example_weights is not Task.example_weights

    def build_model(self) -> Model:
        """Returns a new `keras.Model`, `keras.Layer` or `tf.Module`.

        Called once, in the strategy's scope and under the precision's dtype policy, so layers
        need no dtype argument: each Keras layer casts its inputs and weights to the policy's
        compute dtype. A `tf.Module` must do its own casts, with
        `self.precision.cast_to_compute`.
        """
        if self._given_model is None:
            raise _missing("model", "build_model")
        is_model = isinstance(self._given_model, (keras.Layer, tf.Module))
        return self._given_model if is_model else self._given_model()

    def build_optimizer(self) -> Optimizers:
        """Returns a new Keras optimizer, or a dict of several.

        Called once, in the strategy's scope. In a dict, each key is the name of an attribute of
        the model, and the optimizer updates the variables of that attribute. `compute_loss` then
        returns a dict of losses with the same keys. Each step has a single verdict: either all
        optimizers are applied, or none is.
        """
        if self._given_optimizer is None:
            raise _missing("optimizer", "build_optimizer")
        if isinstance(self._given_optimizer, str):
            return keras.optimizers.get(self._given_optimizer)
        is_optimizer = isinstance(self._given_optimizer, keras.optimizers.Optimizer)
        return self._given_optimizer if is_optimizer else self._given_optimizer()

    @without_autograph
    def compute_loss(self, batch: Batch, training: bool) -> Any:
        """Returns one loss per example. Called in replica context, on this replica's examples.

        With `Losses(reduction="global")` it returns one number, a function of the whole global
        batch: pass what the loss compares through `self.all_gather(x)`.

        Leave out `model.losses` (regularizers, `add_loss`): the trainer adds them.

        Args:
            batch: any number of examples, in the structure of the data.
            training: whether to run the model in training mode.

        Returns:
            losses: shape (examples,), float32, not reduced and not scaled; or the shape of what
            `example_weights` returns, such as (examples, tokens); with `Losses(reduction="global")`
            shape (). With several optimizers, a dict of such tensors. Or (losses, aux), where aux
            is any structure of tensors with one row per example; aux is passed to
            `update_metrics`.
        """
        if self._loss_fn is None:
            raise _missing("loss_fn", "compute_loss")
        if type(self).compute_loss is Task.compute_loss:
            own_step = "train_step" if training else "test_step"
            check_own_steps(self.model, ("compute_loss", own_step), "compute_loss")
        loss_fn = self._loss
        x, y, sample_weight = self._unpack(batch)
        outputs = self._call_model(x, training)
        compared = self._compared(outputs)
        mask = mask_of(loss_fn, compared)
        if mask is not None and not makes_masks(self.model):  # the weights would not count it
            raise ValueError("`model` must make its Keras masks in compute_mask of a layer")
        if self.losses.reduction == "global":
            parts = y, compared, sample_weight, mask
            losses = global_loss(loss_fn, *(self.all_gather(each) for each in parts))
        else:
            losses = example_losses(loss_fn, y, compared, sample_weight)
        if training and self._class_weight:
            losses *= class_factors(y, self._class_weight, loss_fn)
        return losses, tf.nest.map_structure(floats_at_least_float32, outputs)

    @property
    def _loss(self) -> Any:
        """What `loss_fn` stands for, with the names of the model's outputs."""
        return with_output_names(self._loss_fn, self.model)

    def _compared(self, values: Any) -> Any:
        """Returns labels or outputs as the loss takes them: one of Keras takes a single tensor."""
        return only_one(values) if takes_one_output(self._loss_fn) else values

    def _unpack(self, batch: Batch) -> tuple[Batch, Batch, tf.Tensor | None]:
        """Returns (x, y, sample_weight), with labels as the loss takes them."""
        x, y, sample_weight = unpack(batch)
        return x, self._compared(y), sample_weight

    def all_gather(self, x: Any) -> Any:
        """Returns the rows of the whole global batch, inside `compute_loss`.

        On several replicas, each passes one row per example of its own, and all get the rows of
        all replicas in the order of the batch. Gradients flow back to the replica that computed a
        row, and are those of one device with the whole batch. Needs `Losses(reduction="global")`.
        Call it in `compute_loss` itself, not inside `tf.cond`, a loop or a `tf.function`.

        Args:
            x: a tensor, or a structure of tensors: shape (examples, ...).

        Returns:
            The same structure and dtypes: shape (global_batch, ...).

        Raises:
            TypeError, ValueError, RuntimeError: see `trainer.step.all_gather`.
        """
        return all_gather(x)

    def own_rows(self, x: Any) -> Any:
        """Returns this replica's rows of what `all_gather` returned, inside `compute_loss`.

        For aux, which must have one row per example, and to find where a replica's own examples
        stand in the global batch: `self.own_rows(tf.range(global_batch))`.

        Args:
            x: a tensor, or a structure of tensors: shape (global_batch, ...).

        Returns:
            The same structure and dtypes: shape (examples, ...).

        Raises:
            TypeError, ValueError, RuntimeError: see `trainer.step.own_rows`.
        """
        return own_rows(x)

    @without_autograph
    def example_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weight of each example's loss in the mean over the global batch.

        Called on the global batch. The default returns ones, or the third item of
        (x, y, sample_weight). With weights of shape (examples, tokens) an example weighs as much as
        its tokens do together, by their magnitudes, and its loss is their weighted mean. With
        `ignore_class` it counts the labels of other classes, and with a Keras mask on the model's
        outputs the elements that are not masked.
        An overriding method may return shape (examples, tokens), if `compute_loss` returns losses
        of that shape.
        A language model returns token counts; padding has weight 0.
        An example whose weight is 0 still runs through the model, so padding should repeat a real
        example. If a loss is inf or NaN, its derivative is NaN whatever the weight.

        Returns:
            The weights: shape (examples,) or (examples, ...), float32. They may be negative: the
            loss is sum(weights * losses) / sum(abs(weights)).
        """
        weights = None
        given = isinstance(batch, tuple) and len(batch) in (2, 3)
        if self._loss_fn is not None and given and self.losses.reduction == "mean":
            x, y, sample_weight = self._unpack(batch)
            mask = mask_of_outputs(self.model, x)
            weights = example_weights(self._loss_fn, y, sample_weight, mask)
        return ones(batch) if weights is None else weights

    def label_rules(self, batch: Batch) -> list[Rule]:
        """Returns the rules of a batch's labels, if `loss_fn` is a cross-entropy of Keras."""
        if self._loss_fn is None or not isinstance(batch, tuple) or len(batch) not in (2, 3):
            return []
        x, y, _ = self._unpack(batch)
        return label_rules(self._loss, y, lambda: self._compared(self._output_spec(x)))

    def _output_spec(self, x: Batch) -> Any:
        """Returns what the model returns for inputs like `x`, as symbolic tensors."""
        spec = tf.nest.map_structure(tf.type_spec_from_value, x)
        with tf.init_scope():
            forward = tf.function(lambda x: self._call_model(x, training=False), autograph=False)
            return forward.get_concrete_function(spec).structured_outputs

    def build_metrics(self) -> MetricsByName:
        """Returns a dict of new Keras metrics, keyed by name.

        Called twice: once for the metrics of training, and once for those of evaluation.
        """
        return make_metrics(
            self._given_metrics, self._loss, self.model, with_losses=self._adds_losses()
        )

    def _adds_losses(self) -> bool:
        """Returns whether each output's loss is a metric: only the default methods update it."""
        own = type(self).compute_loss, type(self).update_metrics
        return own == (Task.compute_loss, Task.update_metrics)

    @without_autograph
    def update_metrics(self, batch: Batch, aux: Aux) -> None:
        """Updates `self.metrics`. Called in replica context, on applied steps only.

        Args:
            batch: this replica's examples; there may be none.
            aux: the aux that `compute_loss` returned for these examples; () if it returned only
                losses.
        """
        if self.metrics and self._loss_fn is None:
            raise ValueError(
                "`update_metrics` must be overridden for metrics without a loss_fn; got "
                f"{', '.join(self.metrics)}"
            )
        if self.metrics:
            if isinstance(aux, tuple) and not aux:
                raise ValueError("`compute_loss` must return (losses, outputs) for metrics")
            x, y, sample_weight = self._unpack(batch)
            loss_fn, aux = self._loss, self._compared(aux)
            if isinstance(loss_fn, OutputLosses) and not callable(self._given_metrics):
                entries = entries_by_name(
                    self._given_metrics, loss_fn, self.model, with_losses=self._adds_losses()
                )
                update_by_output(self.metrics, entries, loss_fn, y, aux, sample_weight)
                return
            mask = mask_of_outputs(self.model, x) if tf.is_tensor(aux) else None
            if mask is not None:  # the outputs no longer have it
                aux, sample_weight, mask = masked(aux, sample_weight, mask)
            for metric in self.metrics.values():
                update_metric(metric, y, aux, sample_weight, mask)

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns more items for checkpoints, keyed by name: anything that TensorFlow can track."""
        return {}

    def on_train_begin(self) -> None:
        """Called by `train` before the first step, once everything is built and restored."""

    def on_loop_begin(self, step: int) -> None:
        """Called before each inner loop, after `step` steps."""

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Called after each log line of `train`.

        Args:
            step: the last step of the interval that the line is about.
            values: the numbers of the line, keyed by name as in a "train" line of `metrics.jsonl`.
                If no step of the interval was applied, its means are NaN.
        """

    def on_evaluate_begin(self, step: int) -> None:
        """Called before each evaluation of `train` and of `evaluate_continuously`."""

    def on_evaluate_end(self, step: int, results: dict[str, float]) -> None:
        """Called after each evaluation of `train` and of `evaluate_continuously`.

        `evaluate`, which returns its results, does not call it.

        Args:
            step: the number of steps so far.
            results: "loss" and the metrics, keyed by name.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """Called when the run has gone through the training data `epoch` times.

        The run counts from its first step, over all calls of `train`, and an inner loop ends where
        an epoch ends. The length of the data must be known.
        """

    def on_loop_end(self, step: int) -> None:
        """Called after each inner loop, its log line and evaluation, and before saving."""

    def on_recovery(self, step: int, restored: int) -> None:
        """Called when a run that diverged by `step` has been rolled back to step `restored`."""

    def on_train_end(self, summary: Any) -> None:
        """Called by `train` with the `TrainSummary` that it returns."""

    @without_autograph
    def predict_batch(self, batch: Batch) -> Aux:
        """Returns the model's outputs for a batch. Called in replica context.

        The default calls the model with the batch or, if the batch is a tuple, its first item.

        Returns:
            Any structure of tensors with one row per example.
        """
        if type(self).predict_batch is Task.predict_batch:
            check_own_steps(self.model, ["predict_step"], "predict_batch")
        return self._call_model(batch[0] if isinstance(batch, tuple) else batch, training=False)

    def _call_model(self, x: Batch, training: bool) -> Aux:
        named = {"training": training} if isinstance(self.model, keras.Layer) else {}
        self._inputs = widened(self._inputs, tf.nest.map_structure(spec_of_any_size, x))
        return call_user(self.model, x, **named)


def spec_of_any_size(tensor: Any) -> tf.TypeSpec:
    """Returns the spec of an input for any number of examples."""
    spec = tf.type_spec_from_value(tensor)
    dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if dense else spec


def widened(before: Any, now: Any) -> Any:
    """Returns specs that hold the inputs of two calls; those of the first if they do not fit."""
    if before is None:
        return now
    try:
        return tf.nest.map_structure(
            lambda one, other: one.most_specific_common_supertype([other]) or one, before, now
        )
    except (TypeError, ValueError):  # of another structure
        return before


def _missing(argument: str, method: str) -> ValueError:
    return ValueError(f"`{argument}` must be given unless {method}() is overridden; got None")

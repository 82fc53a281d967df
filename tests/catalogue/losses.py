"""The rows of `keras.losses` and `keras.metrics`: each needs labels and outputs of some kind."""

import hypothesis.strategies as st
import keras
from catalogue.rows import NOT_TRAINED, REFUSED, RIGHT, Row

from trainer import Trainer

# Kinds of labels and outputs, which `labels.KINDS` makes.
BINARY, ONE_HOT, SPARSE, NUMBERS, POSITIVE, DIRECTIONS, SIGNS, MASKS, EMBEDDED, SPOKEN = (
    "binary",
    "one-hot",
    "sparse",
    "numbers",
    "positive",
    "directions",
    "signs",
    "masks",
    "embedded",
    "spoken",
)
SMOOTHING = st.sampled_from([0.0, 0.1])


class OwnLoss(keras.losses.Loss):
    """A loss of one's own, which returns one number per output."""

    def call(self, y_true, y_pred):
        """The absolute errors to the power of 1.5."""
        return keras.ops.abs(y_true - y_pred) ** 1.5


class OwnMetric(keras.metrics.Metric):
    """A metric of one's own: counts examples."""

    def __init__(self, **arguments):
        """Creates the count."""
        super().__init__(**arguments)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the number of examples."""
        del y_pred, sample_weight
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        """The count."""
        return self.count


def of(kind, make=None, **arguments):
    """The row of a loss or a metric for one kind of labels."""
    return Row(arguments=arguments, make=make, kind=kind)


def refused(kind, loss, **arguments):
    """The row of a loss that is refused, at least with its default arguments.

    Args:
        kind: as for `of`.
        loss: makes the loss that is refused.
        **arguments: those with which the loss is right; none if it never is.
    """
    return Row(
        arguments=arguments,
        kind=kind,
        verdict=RIGHT if arguments else REFUSED,
        because="refused with an axis that includes the examples"
        if arguments
        else "it compares the examples of a batch with each other",
        refuse=lambda: Trainer(model=lambda: None, optimizer="sgd", loss_fn=loss()),
    )


LOSSES = {
    "BinaryCrossentropy": of(BINARY, label_smoothing=SMOOTHING),
    "BinaryFocalCrossentropy": of(BINARY, apply_class_balancing=st.booleans()),
    "CTC": of(SPOKEN),
    "CategoricalCrossentropy": of(ONE_HOT, label_smoothing=SMOOTHING),
    "CategoricalFocalCrossentropy": of(ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": of(SPARSE),
    "CategoricalHinge": of(ONE_HOT),
    "Circle": refused(EMBEDDED, keras.losses.Circle),
    "CosineSimilarity": of(DIRECTIONS),
    "Dice": refused(MASKS, keras.losses.Dice, axis=(1,)),
    "Hinge": of(SIGNS),
    "Huber": of(NUMBERS, delta=st.sampled_from([0.5, 1.0])),
    "KLDivergence": of(ONE_HOT),
    "LogCosh": of(NUMBERS),
    "Loss": of(NUMBERS, make=OwnLoss),
    "MeanAbsoluteError": of(NUMBERS),
    "MeanAbsolutePercentageError": of(POSITIVE),
    "MeanSquaredError": of(NUMBERS),
    "MeanSquaredLogarithmicError": of(POSITIVE),
    "Poisson": of(POSITIVE),
    "SparseCategoricalCrossentropy": of(SPARSE, ignore_class=st.sampled_from([None, 1])),
    "SquaredHinge": of(SIGNS),
    "Tversky": refused(MASKS, keras.losses.Tversky, axis=(1,)),
}
METRICS = {
    "AUC": of(BINARY),
    "Accuracy": of(NUMBERS),
    "BinaryAccuracy": of(BINARY),
    "BinaryCrossentropy": of(BINARY),
    "BinaryIoU": of(BINARY, target_class_ids=[0, 1]),
    "CategoricalAccuracy": of(ONE_HOT),
    "CategoricalCrossentropy": of(ONE_HOT),
    "CategoricalHinge": of(ONE_HOT),
    "ConcordanceCorrelation": of(NUMBERS),
    "CosineSimilarity": of(DIRECTIONS),
    "F1Score": of(ONE_HOT, average="macro"),
    "FBetaScore": of(ONE_HOT, average="micro", beta=2.0),
    "FalseNegatives": of(BINARY),
    "FalsePositives": of(BINARY),
    "Hinge": of(SIGNS),
    "IoU": of(SPARSE, num_classes=3, target_class_ids=[0, 1], sparse_y_pred=False),
    "KLDivergence": of(ONE_HOT),
    "LogCoshError": of(NUMBERS),
    "Mean": Row(verdict=NOT_TRAINED, because="takes values, not labels; see `update_metrics`"),
    "MeanAbsoluteError": of(NUMBERS),
    "MeanAbsolutePercentageError": of(POSITIVE),
    "MeanIoU": of(SPARSE, num_classes=3, sparse_y_pred=False),
    "MeanMetricWrapper": of(
        NUMBERS, make=lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error)
    ),
    "MeanSquaredError": of(NUMBERS),
    "MeanSquaredLogarithmicError": of(POSITIVE),
    "Metric": of(NUMBERS, make=OwnMetric),
    "OneHotIoU": of(ONE_HOT, num_classes=3, target_class_ids=[0, 2]),
    "OneHotMeanIoU": of(ONE_HOT, num_classes=3),
    "PearsonCorrelation": of(NUMBERS),
    "Poisson": of(POSITIVE),
    "Precision": of(BINARY),
    "PrecisionAtRecall": of(BINARY, recall=0.5),
    "R2Score": of(NUMBERS),
    "Recall": of(BINARY),
    "RecallAtPrecision": of(BINARY, precision=0.5),
    "RootMeanSquaredError": of(NUMBERS),
    "SensitivityAtSpecificity": of(BINARY, specificity=0.5),
    "SparseCategoricalAccuracy": of(SPARSE),
    "SparseCategoricalCrossentropy": of(SPARSE),
    "SparseTopKCategoricalAccuracy": of(SPARSE, k=2),
    "SpecificityAtSensitivity": of(BINARY, sensitivity=0.5),
    "SquaredHinge": of(SIGNS),
    "Sum": Row(verdict=NOT_TRAINED, because="takes values, not labels; see `update_metrics`"),
    "TopKCategoricalAccuracy": of(ONE_HOT, k=2),
    "TrueNegatives": of(BINARY),
    "TruePositives": of(BINARY),
}

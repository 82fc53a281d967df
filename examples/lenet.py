"""LeNet on MNIST with plain SGD, mirrored on all GPUs or on two logical CPUs.

    python examples/lenet.py
    python examples/lenet.py --dataset=digits
    python examples/lenet.py --use_synthetic_data --logical_cpus=4

The network is that of 1998, except for softmax and ordinary pooling, in float16 with float32
master weights. `lenet_half.py` does without the master weights.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import datasets
import keras
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


def lenet(shape):
    """Returns the network for images of a shape; small scans are padded."""
    padding = "same" if shape[0] < 28 else "valid"
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(6, 5, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, padding=padding, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(120, activation="tanh"),
            layers.Dense(84, activation="tanh"),
            layers.Dense(datasets.CLASSES),
        ]
    )


def main(_):
    """Trains without a subclass, on pairs (x, y), with a Keras loss."""
    trainer = make_trainer(
        Trainer,
        model=lambda: lenet(datasets.SHAPES[FLAGS.dataset]),
        optimizer=lambda: keras.optimizers.SGD(0.1),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
    results = run_mode(trainer, *datasets.load_from_flags())
    if results and trainer.is_chief:
        replicas = trainer.strategy.num_replicas_in_sync
        print(f"held-out accuracy {results['accuracy']:.2%} on {replicas} replicas")


if __name__ == "__main__":
    datasets.define_flags("mnist")
    define_flags(strategy="mirrored", logical_cpus=2, precision="mixed_float16")
    app.run(main)

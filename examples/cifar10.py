"""A convolutional network with BatchNorm on CIFAR-10, in float16.

    python examples/cifar10.py
    python examples/cifar10.py --dataset=digits --train_steps=300
    python examples/cifar10.py --use_synthetic_data --train_steps=100

Adam's rate warms up and then falls as a cosine does, over `--train_steps`; a skipped step does not
count. On a CPU, XLA compiles float16 (`--jit_compile=auto`), which is many times slower without.
The evaluation computes in float32, with the same weights.
"""

from trainer import Trainer  # isort: skip  # first: it sets TensorFlow up

import datasets
import keras
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


class Cifar(Trainer):
    """Three stages; each halves the side of the image and doubles the channels."""

    def build_model(self):
        """The precision is not mentioned anywhere."""
        stages = [layer for channels in (32, 64, 128) for layer in stage(channels)]
        return keras.Sequential(
            [
                keras.Input(datasets.SHAPES[FLAGS.dataset]),
                *stages,
                layers.GlobalAveragePooling2D(),
                layers.Dropout(0.2),
                layers.Dense(datasets.CLASSES),
            ]
        )

    def build_optimizer(self):
        """Adam; from 0 to 3e-3 in the first tenth of the run, and back."""
        warmup = FLAGS.train_steps // 10
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, FLAGS.train_steps - warmup, warmup_target=3e-3, warmup_steps=warmup
        )
        return keras.optimizers.Adam(schedule)


def stage(channels):
    """Returns two convolutions, each with BatchNorm, and a pooling."""
    for _ in range(2):
        yield layers.Conv2D(channels, 3, padding="same", use_bias=False)
        yield layers.BatchNormalization(momentum=0.9)  # 0.99 lags behind a short run
        yield layers.ReLU()
    yield layers.MaxPooling2D()


def main(_):
    """Trains, and evaluates on images the network has not seen."""
    cifar = make_trainer(
        Cifar,
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
    results = run_mode(cifar, *datasets.load_from_flags())
    if results and cifar.is_chief:
        print(f"held-out accuracy {results['accuracy']:.2%}, loss {results['loss']:.4f}")


if __name__ == "__main__":
    datasets.define_flags("cifar10")
    define_flags(precision="mixed_float16", batch_size=128, train_steps=4000)
    app.run(main)

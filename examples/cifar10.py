"""A convolutional network with BatchNorm on CIFAR-10, in float16.

    python examples/cifar10.py
    python examples/cifar10.py --dataset=digits --steps=300
    python examples/cifar10.py --use_synthetic_data --steps=100

Adam's learning rate warms up and then decays along a cosine over `--steps` updates; skipped
steps do not count. On a CPU, XLA compiles float16 (`--jit_compile=auto`), which is many times
slower without XLA. The evaluation computes in float32, with the same weights.
"""

from trainer import Trainer  # isort: skip  # import first: it configures TensorFlow

import datasets
import keras
from absl import app, flags
from keras import layers

from trainer.flags import define_flags, make_trainer, run_mode

FLAGS = flags.FLAGS


class Cifar(Trainer):
    """A network of three stages; each halves the image's side and doubles the channels."""

    def build_model(self):
        """Returns the network; the trainer sets the precision."""
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
        """Returns Adam; its learning rate rises to 3e-3 in a tenth of the run, then decays."""
        warmup = FLAGS.steps // 10
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, FLAGS.steps - warmup, warmup_target=3e-3, warmup_steps=warmup
        )
        return keras.optimizers.Adam(schedule)


def stage(channels):
    """Yields the layers of a stage: two convolutions, each with BatchNorm, and a pooling."""
    for _ in range(2):
        yield layers.Conv2D(channels, 3, padding="same", use_bias=False)
        yield layers.BatchNormalization(momentum=0.9)  # 0.99 is too slow for a short run
        yield layers.ReLU()
    yield layers.MaxPooling2D()


def main(_):
    """Trains the network and evaluates it on held-out images."""
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
    define_flags(precision="mixed_float16", global_batch=128, steps=4000)
    app.run(main)

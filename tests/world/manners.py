"""Models in the manner of other projects: with steps of their own, as layers, as a `tf.Module`."""

import importlib

import keras
import numpy as np
import tensorflow as tf
from world.entry import (
    EXAMPLES,
    FAULT,
    REFUSED,
    Entry,
    classes,
    cross_entropy,
    images,
    squares,
    to_waves,
    without_dropout,
)

DIVIDED = ("replicas", "microbatches")


class OwnSteps(keras.Model):
    """Steps of its own, which nobody calls, and compiled in its constructor."""

    def __init__(self, **arguments):
        """Makes the layers."""
        super().__init__(**arguments)
        self.compile("sgd", "mse")

    def train_step(self, data):
        """Not called."""
        raise AssertionError(data)

    test_step = predict_step = train_step

    def compute_loss(self, *arguments, **named):
        """Not called."""
        raise AssertionError(arguments, named)


class Sampling(keras.layers.Layer):
    """keras.io's layer: draws from a normal distribution."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        """Means and logarithms of variances."""
        mean, log_variance = inputs
        noise = keras.random.normal(
            keras.ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator
        )
        return mean + keras.ops.exp(0.5 * log_variance) * noise


class VAE(OwnSteps):
    """keras.io's variational autoencoder."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential([layers.Conv2D(4, 3, 2, "same"), layers.Flatten()])
        self.mean, self.log_variance, self.sample = layers.Dense(2), layers.Dense(2), Sampling()
        self.decoder = keras.Sequential(
            [
                layers.Dense(8 * 8 * 4, "relu"),
                layers.Reshape([8, 8, 4]),
                layers.Conv2DTranspose(3, 3, 2, "same"),
            ]
        )
        self.loss_tracker = keras.metrics.Mean()

    def call(self, inputs):
        """The reconstruction, the mean and the logarithm of the variance."""
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(self.sample([mean, log_variance])), mean, log_variance


def built(make, shape, dtype="float32"):
    """A function that makes a model and builds it."""

    def model():
        made = make()
        made(tf.zeros([1, *shape], dtype))
        return made

    return model


def elbo(model, batch, training, gather):
    """The evidence lower bound of each example."""
    del gather
    outputs, mean, log_variance = model(batch, training=training)
    mean, log_variance = tf.cast(mean, tf.float32), tf.cast(log_variance, tf.float32)
    divergence = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
    return squares(outputs, batch) + 0.01 * tf.reduce_sum(divergence, axis=1)


class DDIM(OwnSteps):
    """keras.io's denoising diffusion: a small U-Net with BatchNorm, and a network of averages."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        self.normalizer.adapt(np.random.default_rng(0).normal(0.5, size=[4, 16, 16, 3]))
        self.network = self.unet()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.trainable = False

    @staticmethod
    def unet():
        """Images and variances of noise; returns the noise."""
        layers = keras.layers
        image, variance = keras.Input([16, 16, 3]), keras.Input([1, 1, 1])
        waves = layers.UpSampling2D(16)(layers.Dense(4, "tanh")(variance))
        x = first = layers.Concatenate()([layers.Conv2D(8, 1)(image), waves])
        x = layers.BatchNormalization(center=False, scale=False)(x)
        x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
        x = layers.UpSampling2D(2, interpolation="bilinear")(layers.AveragePooling2D(2)(x))
        x = layers.Concatenate()([x, first])
        return keras.Model([image, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))

    def call(self, inputs):
        """The predicted noise."""
        image, noise, time = inputs
        angle = 1.4 * time[:, None, None, None] + 0.1
        noisy = keras.ops.cos(angle) * self.normalizer(image) + keras.ops.sin(angle) * noise
        return self.network([noisy, keras.ops.sin(angle) ** 2])


def ddim():
    """The same, built."""
    model = DDIM()
    model([tf.zeros([1, 16, 16, 3]), tf.zeros([1, 16, 16, 3]), tf.zeros([1])])
    return model


def noised(random):
    """Images, noise and times: drawn by the data, so that a plain loop sees the same."""
    time = random.uniform(size=[EXAMPLES]).astype("float32")
    return images(random), images(random), time


def noise_loss(model, batch, training, gather):
    """The mean square of each example's errors in the noise."""
    del gather
    return squares(model(batch, training=training), batch[1])


class Head(keras.Model):
    """A functional model whose subclass has a constructor of its own."""

    def __init__(self, units, **arguments):
        """Makes the layers."""
        x = keras.Input([4])
        hidden = keras.layers.Dense(8, "relu")(x)
        super().__init__(inputs=x, outputs=keras.layers.Dense(units)(hidden), **arguments)
        self.units = units

    def get_config(self):
        """Its own arguments."""
        return {"units": self.units}


class Block(keras.layers.Layer):
    """A layer that is used as the model."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, "gelu"), keras.layers.Dense(3)

    def call(self, inputs):
        """Logits."""
        return self.out(self.hidden(inputs))


class Approximator(OwnSteps):
    """In bayesflow's manner: a summary of the data conditions a posterior; a `compute_metrics`."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        self.summary_network = keras.Sequential([keras.layers.GRU(4)])
        self.inference_network = Block()

    def call(self, inputs):
        """Means and the logarithm of a deviation."""
        return self.inference_network(self.summary_network(inputs))


def posterior(model, batch, training, gather):
    """Each example's negative logarithm of the density of its parameter."""
    del gather
    observations, parameters = batch
    outputs = tf.cast(model(observations, training=training), tf.float32)
    mean, log_deviation = outputs[:, :2], outputs[:, 2:]
    errors = (parameters - mean) * tf.exp(-log_deviation)
    return tf.reduce_sum(0.5 * errors**2 + log_deviation, axis=1)


def observed(random):
    """Time series and their parameters."""
    series = random.normal(size=[EXAMPLES, 5, 3]).astype("float32")
    return series, random.normal(size=[EXAMPLES, 2]).astype("float32")


def vectors(random, size=4):
    """Vectors."""
    return random.normal(size=[EXAMPLES, size]).astype("float32")


def labelled(random):
    """Vectors and labels."""
    return vectors(random), classes(random)


def logits_loss(model, batch, training, gather):
    """The cross entropy of a model that need not know `training`."""
    del training, gather
    logits = tf.cast(model(batch[0]), tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)


class Penalty(keras.layers.Layer):
    """A number of the whole batch, added only in training, as routers of mixtures do."""

    def call(self, x, training=None):
        """Returns x."""
        if training:
            self.add_loss(0.01 * keras.ops.sum(x**2))
        return x


def router():
    """A model with such a layer."""
    x = keras.Input([4])
    return keras.Model(x, Penalty()(keras.layers.Dense(3)(x)))


def stateful():
    """An LSTM that goes on where the last batch ended."""
    inputs = keras.Input(batch_shape=(EXAMPLES, 5, 3))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.LSTM(4, stateful=True)(inputs)))


def graph_batch(random):
    """Nodes of all graphs, the graph of each, each graph's number, and a temperature."""
    return {
        "nodes": random.normal(size=[20, 4]).astype("float32"),
        "owner": np.sort(np.append(random.integers(EXAMPLES, size=20 - EXAMPLES), range(EXAMPLES))),
        "y": random.normal(size=[EXAMPLES]).astype("float32"),
        "temperature": np.float32(0.5),
    }


def graph_loss(model, batch, training, gather):
    """The mean over graphs."""
    del gather
    nodes = tf.cast(model(batch["nodes"], training=training), tf.float32)[:, 0]
    found = tf.math.segment_mean(nodes, batch["owner"]) / batch["temperature"]
    return tf.reduce_mean((found - batch["y"]) ** 2)


def policy_batch(random):
    """States, actions, and advantages of both signs."""
    advantages = random.choice([-1.0, 1.0], size=EXAMPLES, p=[0.7, 0.3]).astype("float32")
    return vectors(random), classes(random), advantages


def policy_loss(model, batch, training, gather):
    """REINFORCE: the logarithm of each action's probability, by its advantage."""
    states, actions, advantages = batch
    return advantages * logits_loss(model, (states, actions), training, gather)


class SimCLR(OwnSteps):
    """keras.io's contrastive learning of two views."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential(
            [layers.Conv2D(8, 3, 2, activation="relu"), layers.Flatten()]
        )
        self.projection_head = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(8)])

    def call(self, inputs):
        """Projections."""
        return self.projection_head(self.encoder(inputs))


def contrastive(model, batch, training, gather):
    """Each view's partner among all."""
    views = [tf.cast(model(view, training=training), tf.float32) for view in batch]
    one, other = gather([tf.math.l2_normalize(view, axis=1) for view in views])
    similar = 10.0 * tf.matmul(one, other, transpose_b=True)
    labels = tf.range(tf.shape(one)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similar))


class Waves(keras.layers.Layer):
    """A complex weight."""

    def build(self, shape):
        """Ones in both parts."""
        self.mask = self.add_weight(
            shape=[shape[-1]],
            dtype="complex64",
            name="mask",
            initializer=lambda shape, **_: tf.complex(tf.ones(shape), tf.ones(shape)),
        )

    def call(self, x):
        """The magnitudes of the products."""
        return tf.abs(tf.cast(x, tf.complex64) * self.mask)


def waves():
    """A model with such a layer."""
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(4), Waves(dtype="float32")])


def application(name, size=32, **arguments):
    """A function that makes a model of `keras.applications`, without weights of others."""

    def model():
        make = getattr(keras.applications, name)
        made = make(
            weights=None,
            input_shape=[size, size, 3],
            classes=3,
            classifier_activation=None,
            **arguments,
        )
        return without_dropout(made)

    def batch(random):
        return images(random, size), classes(random)

    return Entry(
        name,
        "keras.applications",
        model,
        batch,
        loss_fn=cross_entropy,
        shares=True,
        optimizer=lambda: keras.optimizers.SGD(1e-6),
        steps=1,
    )


def sonnet_mlp():
    """Sonnet's MLP, whose variables are made by the first call."""
    model = importlib.import_module("sonnet").nets.MLP([8, 3])
    model(tf.zeros([1, 4]))
    return model


def sonnet_convolutions():
    """Sonnet's ResNet block by hand: convolutions and a LayerNorm."""
    sonnet = importlib.import_module("sonnet")
    model = sonnet.Sequential(
        [
            sonnet.Conv2D(8, 3, stride=2),
            sonnet.LayerNorm(axis=-1, create_scale=True, create_offset=True),
            tf.nn.relu,
            sonnet.Flatten(),
            sonnet.Linear(3),
        ]
    )
    model(tf.zeros([1, 16, 16, 3]))
    return model


def sonnet_rnn():
    """Sonnet's LSTM, unrolled."""
    sonnet = importlib.import_module("sonnet")

    class Unrolled(sonnet.Module):
        def __init__(self):
            super().__init__()
            self.core, self.head = sonnet.LSTM(6), sonnet.Linear(3)

        def __call__(self, series):
            steps = tf.transpose(series, [1, 0, 2])
            state = self.core.initial_state(tf.shape(series)[0])
            outputs, _ = sonnet.dynamic_unroll(self.core, steps, state)
            return self.head(outputs[-1])

    model = Unrolled()
    model(tf.zeros([1, 5, 3]))
    return model


class Flow(tf.Module):
    """TFP's RealNVP: the density of two numbers."""

    def __init__(self):
        """Makes the layers."""
        super().__init__()
        tfp = importlib.import_module("tensorflow_probability")
        self.shift = tf.Variable([0.1, -0.1], name="shift")
        self.matrix = tf.Variable([[0.5, 0.1], [-0.2, 0.3]], name="matrix")
        self.deviation = tfp.util.TransformedVariable(1.5, tfp.bijectors.Softplus())

        def affine(x, *_, **__):
            hidden = tf.tanh(x * self.matrix[:1, :1] + self.shift[0])
            return hidden * self.matrix[1, 0], hidden * self.matrix[1, 1]

        self.flow = tfp.bijectors.RealNVP(num_masked=1, shift_and_log_scale_fn=affine)
        self.distributions = tfp.distributions

    def __call__(self, x):
        """The logarithm of each example's density."""
        base = self.distributions.MultivariateNormalDiag(self.shift, self.deviation * tf.ones([2]))
        return self.distributions.TransformedDistribution(base, self.flow).log_prob(x)


def density(model, batch, training, gather):
    """The negative logarithm of the density."""
    del training, gather
    return -model(batch)


def gaussian_process():
    """GPflow's sparse variational process, in float32."""
    gpflow = importlib.import_module("gpflow")
    with gpflow.config.as_context(gpflow.config.Config(float=np.float32, jitter=1e-4)):
        return gpflow.models.SVGP(
            gpflow.kernels.SquaredExponential(),
            gpflow.likelihoods.Gaussian(),
            inducing_variable=np.linspace(-1, 1, 5, dtype="float32")[:, None],
            num_data=EXAMPLES,
        )


def process_loss(model, batch, training, gather):
    """The negative evidence lower bound of a batch: a number of all of it."""
    del training
    gpflow = importlib.import_module("gpflow")
    batch = gather(batch)  # other replicas run meanwhile, and GPflow's configuration is global
    with gpflow.config.as_context(gpflow.config.Config(float=np.float32, jitter=1e-4)):
        return -model.elbo(batch) / EXAMPLES


def curve(random):
    """Points of a curve."""
    x = random.uniform(-1, 1, size=[EXAMPLES, 1]).astype("float32")
    return x, np.sin(3 * x)


def coupling_flow():
    """An invertible network of bayesflow: a `keras.Layer`."""
    networks = importlib.import_module("bayesflow").networks
    model = networks.CouplingFlow(depth=2, subnet_kwargs={"widths": [8]}, use_actnorm=False)
    model.build([None, 2], [None, 3])
    return without_dropout(model)


def flow_loss(model, batch, training, gather):
    """The negative logarithm of the density of two parameters."""
    del gather
    series, parameters = batch
    _, log_density = model(
        parameters, conditions=series[:, 0], inverse=False, density=True, training=training
    )
    return -tf.cast(log_density, tf.float32)


MANNERS = [
    Entry("VAE", "keras.io", built(VAE, [16, 16, 3]), images, loss=elbo, draws=True),
    Entry("DDIM", "keras.io", ddim, noised, loss=noise_loss, shares=True, in_ci=True),
    Entry(
        "SimCLR",
        "keras.io",
        built(SimCLR, [16, 16, 3]),
        lambda r: (images(r), images(r)),
        loss=contrastive,
        coupled=True,
    ),
    Entry("functional subclass", "a user's", lambda: Head(3), labelled, loss_fn=cross_entropy),
    Entry(
        "layer as the model", "a user's", built(Block, [4]), labelled, loss=logits_loss, in_ci=True
    ),
    Entry(
        "mixture with a router's loss",
        "a user's",
        router,
        labelled,
        loss_fn=cross_entropy,
        shares=True,
        because="a router's loss of all of a share: a warning names its layer",
    ),
    Entry(
        "stateful LSTM",
        "a user's",
        stateful,
        lambda random: random.normal(size=[EXAMPLES, 5, 3]).astype("float32"),
        loss=to_waves(),
        expected=dict.fromkeys(DIVIDED, REFUSED),
    ),
    Entry(
        "graphs, with a temperature",
        "a user's",
        lambda: keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        ),
        graph_batch,
        loss=graph_loss,
        coupled=True,
        expected=dict.fromkeys(DIVIDED, REFUSED),
    ),
    Entry(
        "REINFORCE, negative advantages",
        "a user's",
        lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(3)]),
        policy_batch,
        loss=policy_loss,
    ),
    Entry(
        "complex weights",
        "a user's",
        waves,
        vectors,
        loss=to_waves(),
        expected=dict.fromkeys(("float32", "float16", *DIVIDED), REFUSED),
        because="train the real and the imaginary part",
    ),
    Entry(
        "approximator", "bayesflow's manner", built(Approximator, [5, 3]), observed, loss=posterior
    ),
    Entry(
        "CouplingFlow",
        "bayesflow",
        coupling_flow,
        observed,
        loss=flow_loss,
        needs=("bayesflow",),
        expected={"float16": FAULT},
        because="adds float16 to float32",
    ),
    Entry("MLP", "Sonnet", sonnet_mlp, labelled, loss=logits_loss, needs=("sonnet",)),
    Entry(
        "convolutions",
        "Sonnet",
        sonnet_convolutions,
        lambda r: (images(r), classes(r)),
        loss=logits_loss,
        needs=("sonnet",),
    ),
    Entry(
        "LSTM",
        "Sonnet",
        sonnet_rnn,
        lambda r: (observed(r)[0], classes(r)),
        loss=logits_loss,
        needs=("sonnet",),
    ),
    Entry(
        "RealNVP",
        "TensorFlow Probability",
        Flow,
        lambda r: vectors(r, 2),
        loss=density,
        needs=("tensorflow_probability",),
    ),
    Entry(
        "SVGP",
        "GPflow",
        gaussian_process,
        curve,
        loss=process_loss,
        coupled=True,
        needs=("gpflow",),
        because="installed by hand: its metadata asks for an older NumPy",
    ),
    application("MobileNetV2", alpha=0.35),
    application("ResNet50"),
    application("EfficientNetB0"),
    application("DenseNet121"),
]

"""The loss-scale rules of other systems: the systems themselves if pip has them, else short
programs.

Each is a `System`. Its class attributes are that system's defaults, `scale` is the scale of the
next step, and `step(overflow)` advances it. The packages are imported on first use.
"""

import functools
import importlib
import importlib.metadata
import math
import warnings

import numpy as np

SMALLEST, LARGEST = 2.0**-126, 2.0**126


class OutOfBounds(Exception):  # noqa: N818 - a signal to the caller, not an error
    """The system raised, or reached a scale that ours never takes."""


class System:
    """A loss scale that moves as in the named system.

    Args:
        **constants: override the class attributes, which are the system's defaults.
    """

    package = None  # the package of the real system; None for a short program
    first_scale: float
    growth_interval: int

    def __init__(self, **constants):
        """Starts the first run."""
        for name, value in constants.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            setattr(self, name, value)
        self.restart()

    def restart(self):
        """Starts a new run."""
        self._begin()

    def _begin(self):
        self.scale = self.first_scale

    def step(self, overflow):
        """Advances the scale by one step.

        Raises:
            OutOfBounds: if the system raises, or its scale leaves the range of ours.
        """
        self._overflow() if overflow else self._finite()
        if not SMALLEST <= self.scale <= LARGEST:  # also for NaN
            raise OutOfBounds

    def _overflow(self):
        raise NotImplementedError

    def _finite(self):
        raise NotImplementedError

    @classmethod
    def kind(cls):
        """The version of the real package, or "(short program)"."""
        if cls.package is None:
            return "(short program)"
        return f"{importlib.metadata.version(cls.package)} (real)"


def f32(number):
    """The number rounded to float32."""
    return float(np.float32(number))


def quietly(module):
    """Imports a module and ignores the warnings that its import raises about other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


class Keras3(System):
    """The real optimizer's `apply` on one weight, in a graph."""

    package = "keras"
    growth_interval = None

    def _begin(self):
        if not hasattr(self, "_apply"):
            self._build()
        self._optimizer.step_counter.assign(0)
        self._optimizer.dynamic_scale.assign(self._optimizer.initial_scale)
        self.scale = float(self._optimizer.dynamic_scale.numpy())

    def _build(self):
        keras, tf = quietly("keras"), quietly("tensorflow")
        interval = {"dynamic_growth_steps": self.growth_interval} if self.growth_interval else {}
        self._optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **interval)
        weight = keras.Variable(1.0)
        self._optimizer.build([weight])

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def apply(gradient):
            self._optimizer.apply([gradient], [weight])
            return self._optimizer.dynamic_scale.value

        # A gradient of 0 keeps the weight finite at every scale.
        self._gradients = {False: tf.constant(0.0), True: tf.constant(float("inf"))}
        self._apply = apply.get_concrete_function()

    def _overflow(self):
        self.scale = float(self._apply(self._gradients[True]).numpy())

    def _finite(self):
        self.scale = float(self._apply(self._gradients[False]).numpy())


class PyTorch(System):
    """The real `GradScaler` on one weight: `unscale_` finds the overflow, `update` moves."""

    package = "torch"
    growth_interval = None

    def _begin(self):
        torch = quietly("torch")
        interval = {"growth_interval": self.growth_interval} if self.growth_interval else {}
        self._scaler = torch.amp.GradScaler("cpu", **interval)
        self._scaler.scale(torch.ones(()))  # makes its tensors
        self._weight = torch.nn.Parameter(torch.ones(()))
        self._optimizer = torch.optim.SGD([self._weight])
        # In-place unscaling does not change 0 or inf.
        self._gradients = {False: torch.tensor(0.0), True: torch.tensor(float("inf"))}
        self.scale = self._scaler.get_scale()

    def _update(self, overflow):
        self._weight.grad = self._gradients[overflow]
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()
        self.scale = self._scaler.get_scale()

    def _overflow(self):
        self._update(overflow=True)

    def _finite(self):
        self._update(overflow=False)


class Jmp(System):
    """The real `adjust`, compiled. The object is built inside the function, because as a JAX tree
    it loses its floor.
    """

    package = "jmp"
    first_scale = 2.0**15  # required by jmp; this value is from its documentation
    growth_interval = None

    def _begin(self):
        super()._begin()
        self._state = np.float32(self.scale), np.int32(0)

    @staticmethod
    @functools.cache
    def _adjust():
        make = quietly("jmp").DynamicLossScale

        def adjust(scale, counter, finite, interval):
            period = {"period": interval} if interval else {}
            moved = make(scale, counter, **period).adjust(finite)
            return moved.loss_scale, moved.counter

        return quietly("jax").jit(adjust, static_argnums=3)

    def _move(self, finite):
        self._state = self._adjust()(*self._state, finite, self.growth_interval)
        self.scale = float(self._state[0])

    def _overflow(self):
        self._move(np.False_)

    def _finite(self):
        self._move(np.True_)


class Flax(System):
    """The real `DynamicScale`, on a function whose gradient is 1 or inf, compiled."""

    package = "flax"
    growth_interval = None

    def _begin(self):
        make = quietly("flax.training.dynamic_scale").DynamicScale
        interval = {"growth_interval": self.growth_interval} if self.growth_interval else {}
        self._state = make(**interval)
        self.scale = float(self._state.scale)

    @staticmethod
    @functools.cache
    def _grad():
        def update(state, slope):
            return state.value_and_grad(lambda weight: weight * slope)(1.0).dynamic_scale

        return quietly("jax").jit(update)

    def _overflow(self):
        self._state = self._grad()(self._state, np.float32(np.inf))
        self.scale = float(self._state.scale)

    def _finite(self):
        self._state = self._grad()(self._state, np.float32(1.0))
        self.scale = float(self._state.scale)


class TFKeras(System):
    """tf_keras's `LossScaleOptimizer`."""

    first_scale, growth_interval = 2.0**15, 2000

    def _begin(self):
        super()._begin()
        self._count = 0

    def _overflow(self):
        self._count = 0
        self.scale = max(f32(self.scale / 2), 1.0)

    def _finite(self):
        self._count += 1
        if self._count >= self.growth_interval:
            self._count = 0
            # Doubling stays finite within our bounds, so no guard is needed.
            self.scale = f32(self.scale * 2)


class DeepSpeed(System):
    """ZeRO's scaler. It stores two step numbers; their distance is the count to growth."""

    first_scale, growth_interval = 2.0**16, 1000
    min_scale, hysteresis, consecutive, raises_at_floor = 1.0, 2, False, True
    since_0_17_1 = True

    def _begin(self):
        super()._begin()
        self._now, self._last, self._left = 0, -1, self.hysteresis

    def _overflow(self):
        if self._left == 1:
            if self.scale == self.min_scale and self.raises_at_floor:
                raise OutOfBounds
            self.scale = max(self.scale / 2, self.min_scale)
        else:
            self._left -= 1
        self._last = self._now
        self._now += 1

    def _finite(self):
        distance = self._now - self._last
        if self.since_0_17_1:
            grows = distance > 1 and (distance - 1) % self.growth_interval == 0
        else:
            grows = distance % self.growth_interval == 0
        if grows:
            self.scale *= 2
        if grows or self.consecutive:
            self._left = self.hysteresis
        self._now += 1


class OldDeepSpeed(DeepSpeed):
    """DeepSpeed before 0.17.1."""

    since_0_17_1 = False


class Megatron(System):
    """Megatron-Core's `DynamicGradScaler`: the hysteresis can go below 0, and growth refills it."""

    first_scale, growth_interval, min_scale, hysteresis = 2.0**32, 1000, 1.0, 2

    def _begin(self):
        super()._begin()
        self._count, self._left = 0, self.hysteresis

    def _overflow(self):
        self._count = 0
        self._left -= 1
        if self._left <= 0:
            self.scale = max(f32(self.scale * 0.5), self.min_scale)

    def _finite(self):
        self._count += 1
        if self._count == self.growth_interval:
            self._count, self._left = 0, self.hysteresis
            self.scale = f32(self.scale * 2)


class Fairseq(System):
    """fairseq's `DynamicLossScaler`."""

    first_scale, growth_interval, min_scale = 2.0**15, 2000, 1e-4
    tolerance, threshold = 0.0, None

    def _begin(self):
        super()._begin()
        self._now, self._last_overflow, self._last_move, self._overflows = 0, -1, -1, 0
        self._interval = self.growth_interval

    def _overflow(self):
        before = self.scale
        self._last_overflow = self._now
        self._overflows += 1
        if self._overflows / (self._now - self._last_move) >= self.tolerance:
            self._back_off()
            self._last_move, self._overflows = self._now, 0
        self._check_floor(before)
        self._now += 1

    def _finite(self):
        if (self._now - self._last_overflow) % self._interval == 0:
            self._grow()
            self._last_move = self._now
        self._now += 1

    def _back_off(self):
        self.scale /= 2
        if self.threshold is not None:
            self.scale = max(self.scale, self.threshold)

    def _grow(self):
        self.scale *= 2

    def _check_floor(self, before):
        if self.scale <= self.min_scale:
            self.scale = before
            raise OutOfBounds


class Metaseq(Fairseq):
    """metaseq's `DynamicLossScaler`: the interval changes too, and the floor raises no error."""

    first_scale, growth_interval, min_scale = 4.0, 256, 2.0**-5

    def _back_off(self):
        super()._back_off()
        self._interval = max(int(self._interval / 2), 1)

    def _grow(self):
        super()._grow()
        self._interval *= 2.0

    def _check_floor(self, before):
        if self.scale < self.min_scale:
            self.scale = before


class ApexHysteresis(System):
    """Apex's `update_scale_hysteresis` kernel: every finite step refills the hysteresis."""

    first_scale, growth_interval, hysteresis = 2.0**16, 2000, 2

    def _begin(self):
        super()._begin()
        self._count, self._left = 0, self.hysteresis

    def _overflow(self):
        self._count = 0
        self._left -= 1
        if self._left <= 0:
            self.scale = f32(self.scale * 0.5)

    def _finite(self):
        self._left = self.hysteresis
        self._count += 1
        if self._count == self.growth_interval:
            self._count = 0
            grown = f32(self.scale * 2.0)
            self.scale = grown if math.isfinite(grown) else self.scale


class ColossalAI(System):
    """ColossalAI's `DynamicGradScaler`: it counts overflows upwards, and growth clears
    the count.
    """

    first_scale, growth_interval, min_scale, max_scale = 2.0**16, 1000, 1.0, 2.0**32
    hysteresis = 2

    def _begin(self):
        super()._begin()
        self._count, self._overflows = 0, 0

    def _overflow(self):
        self._count = 0
        self._overflows += 1
        if self._overflows >= self.hysteresis:
            self.scale = max(self.scale * 0.5, self.min_scale)

    def _finite(self):
        self._count += 1
        if self._count == self.growth_interval:
            self._count, self._overflows = 0, 0
            self.scale = min(self.scale * 2.0, self.max_scale)

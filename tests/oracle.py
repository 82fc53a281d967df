"""The dynamic rules in plain Python, written from their docstrings: slow, short and simple.

A state is a tuple of numbers in the order of the rule's NamedTuple. Causes that no scale can cure
leave a state unchanged and are not passed to an oracle: `finite` is False for overflows only.
"""

import math

LONGEST_INTERVAL = 2**30  # upper bound on the interval of `TolerantLossScale`


def numbers(state):
    """A rule's state as plain numbers."""
    return tuple(field.numpy().item() for field in state)


def clip(scale, rule):
    """Clips a scale to the rule's bounds."""
    return min(max(scale, rule.min_scale), rule.max_scale)


def start(rule):
    """The first state of `DynamicLossScale`: scale, finite steps, overflows left."""
    return rule.initial_scale, -rule.grace_steps, rule.hysteresis


def advance(scale, finite_steps, overflows_left, finite, rule):
    """One step of `DynamicLossScale`."""
    if not finite:
        overflows_left = max(overflows_left - 1, 0)
        if overflows_left == 0:
            scale *= rule.backoff_factor
        return clip(scale, rule), -rule.grace_steps, overflows_left
    finite_steps += 1
    if rule.hysteresis_refill == "finite_step":
        overflows_left = rule.hysteresis
    shorter = [interval for below, interval in rule.low_scale_intervals if scale < below]
    if finite_steps >= min([rule.growth_interval, *shorter]):
        return clip(scale * rule.growth_factor, rule), 0, rule.hysteresis
    return clip(scale, rule), finite_steps, overflows_left


def start_tolerant(rule):
    """The first state of `TolerantLossScale`: scale, finite steps, steps, overflows, growth
    interval.
    """
    return rule.initial_scale, 0, 0, 0, rule.growth_interval


def advance_tolerant(scale, finite_steps, steps, overflows, interval, finite, rule):
    """One step of `TolerantLossScale`."""
    factor = 1.0
    steps += 1
    if finite:
        finite_steps += 1
        if finite_steps % interval == 0:
            factor = rule.growth_factor
    else:
        finite_steps = 0
        overflows += 1
        if overflows / steps >= rule.tolerance:
            factor, overflows = rule.backoff_factor, 0
    if factor != 1:
        steps = 0
        if rule.scale_interval:
            interval = min(max(int(interval * factor), 1), LONGEST_INTERVAL)
    return clip(scale * factor, rule), finite_steps, steps, overflows, interval


def start_headroom(rule):
    """The first state of `HeadroomLossScale`: scale, finite steps, peak, found."""
    return rule.initial_scale, 0, 0.0, False


def leaves_headroom(magnitude, scale, rule):
    """Whether the scaled gradient times 2^headroom_bits is at most the largest float16."""
    return magnitude * scale * 2**rule.headroom_bits <= 65504


def advance_headroom(scale, finite_steps, peak, found, finite, magnitude, rule):
    """One step of `HeadroomLossScale`. Doubles represent its products of powers of two exactly."""
    if not found:
        if not finite:
            return clip(scale / 2**20, rule), 0, 0.0, False
        if magnitude == 0:
            return clip(scale * 2**20, rule), 0, 0.0, False
        scale = rule.max_scale
        while scale > rule.min_scale and not leaves_headroom(magnitude, scale, rule):
            scale /= 2
        return scale, 0, 0.0, True
    if not finite:
        return clip(scale * rule.backoff_factor, rule), 0, 0.0, True
    finite_steps, peak = finite_steps + 1, max(peak, magnitude)
    if finite_steps < rule.growth_interval:
        return clip(scale, rule), finite_steps, peak, True
    if leaves_headroom(peak, scale * rule.growth_factor, rule):
        scale *= rule.growth_factor
    return clip(scale, rule), 0, 0.0, True


def weighted_mean(values, decay):
    """The weighted mean of a history. Each value's weight is `decay` times that of the next one."""
    weights = [decay**age for age in reversed(range(len(values)))]
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def log_max_x(scale, finite, magnitude):
    """The base-2 logarithm of a step's magnitude; an overflow counts as one bit above float16's
    largest.
    """
    return math.log2(magnitude) if finite else math.log2(65504 / scale) + 1


def log_max_statistics(xs, rule):
    """The mean and standard deviation of a non-empty history of x."""
    about = weighted_mean(xs, rule.deviation_decay)
    variance = weighted_mean([(x - about) ** 2 for x in xs], rule.deviation_decay)
    return weighted_mean(xs, rule.mean_decay), math.sqrt(variance)


def log_max_exponent(xs, rule):
    """The unrounded exponent of the largest scale at which the statistics of x fit."""
    mean, deviation = log_max_statistics(xs, rule)
    return math.log2(65504) - (mean + rule.deviations * deviation)


def advance_log_max(scale, exponent, finite, rule):
    """The scale of `LogMaxLossScale` after a step, from the scale before it and
    `log_max_exponent`.
    """
    fitting = clip(2.0 ** min(max(math.floor(exponent), -126), 126), rule)
    return fitting if finite else min(fitting, clip(scale / 2, rule))

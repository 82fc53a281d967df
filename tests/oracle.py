"""The moving rules in plain Python: slow, short, obviously right. From what their docstrings say.

A state is a tuple of numbers in the order of the rule's NamedTuple. What a scale cannot cure
leaves a state as it is, so that no oracle is told of it: `finite` is False for overflows alone.
"""

import math

LONGEST_INTERVAL = 2**30  # where `TolerantLossScale` stops lengthening its interval


def numbers(state):
    """A rule's state as plain numbers."""
    return tuple(field.numpy().item() for field in state)


def clip(scale, rule):
    """Brings a scale back into the rule's bounds."""
    return min(max(scale, rule.min_scale), rule.max_scale)


def start(rule):
    """`DynamicLossScale` before the first step: scale, finite steps, overflows left."""
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
    """`TolerantLossScale` at first: scale, finite steps, steps, overflows, growth interval."""
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
    """`HeadroomLossScale` before the first step: scale, finite steps, peak, found."""
    return rule.initial_scale, 0, 0.0, False


def leaves_headroom(magnitude, scale, rule):
    """Whether a scaled gradient stays `headroom_bits` factors of two below the largest float16."""
    return magnitude * scale * 2**rule.headroom_bits <= 65504


def advance_headroom(scale, finite_steps, peak, found, finite, magnitude, rule):
    """One step of `HeadroomLossScale`. Exact: doubles hold its products of powers of two."""
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
    """The mean of a history in which a value weighs `decay` times what the next one does."""
    weights = [decay**age for age in reversed(range(len(values)))]
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def log_max_x(scale, finite, magnitude):
    """What a step that says something counts as; an overflow as one bit more than fits."""
    return math.log2(magnitude) if finite else math.log2(65504 / scale) + 1


def log_max_statistics(xs, rule):
    """The mean and the deviation of a history of x that is not empty."""
    about = weighted_mean(xs, rule.deviation_decay)
    variance = weighted_mean([(x - about) ** 2 for x in xs], rule.deviation_decay)
    return weighted_mean(xs, rule.mean_decay), math.sqrt(variance)


def log_max_exponent(xs, rule):
    """The exponent, not yet rounded, at which the statistics of a history of x just fit."""
    mean, deviation = log_max_statistics(xs, rule)
    return math.log2(65504) - (mean + rule.deviations * deviation)


def advance_log_max(scale, exponent, finite, rule):
    """The scale of `LogMaxLossScale` after a step, from the one before and `log_max_exponent`."""
    fitting = clip(2.0 ** min(max(math.floor(exponent), -126), 126), rule)
    return fitting if finite else min(fitting, clip(scale / 2, rule))

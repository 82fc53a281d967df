"""`DynamicLossScale` in plain Python: slow, short, obviously right."""


def start(rule):
    """The state before the first step: scale, finite steps, overflows left."""
    return rule.initial_scale, 0, rule.hysteresis


def advance(scale, finite_steps, overflows_left, finite, rule):
    """One step of the rule as its docstring tells it."""
    if finite:
        finite_steps += 1
        if finite_steps >= rule.growth_interval:
            return min(scale * rule.growth_factor, rule.max_scale), 0, rule.hysteresis
        return scale, finite_steps, overflows_left
    overflows_left = max(overflows_left - 1, 0)
    if overflows_left == 0:
        scale = max(scale * rule.backoff_factor, rule.min_scale)
    return scale, 0, overflows_left

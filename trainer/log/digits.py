"""How losses and metrics are printed."""


def format_number(value: float) -> str:
    """Returns a loss or a metric with the digits that it needs.

    Example:
        >>> [format_number(value) for value in (0.25, 0.0, 0.00123456, -8.3e-05, 123456.789, 1e30)]
        ['0.2500', '0.0000', '0.00123', '-8.3e-05', '123457', '1e+30']
    """
    if value == 0 or 0.01 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.6g}"

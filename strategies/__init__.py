"""Where a step runs, how its batch is divided, and how its replicas agree."""

from strategies.agreements import agree, sum_gradients
from strategies.division import Share, check_divisible, take, whole
from strategies.factories import split_cpu
from strategies.registry import create, names, register

__all__ = [
    "Share",
    "agree",
    "check_divisible",
    "create",
    "names",
    "register",
    "split_cpu",
    "sum_gradients",
    "take",
    "whole",
]

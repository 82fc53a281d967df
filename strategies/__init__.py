"""Where a step runs, how its batch is divided, and how its replicas agree."""

from strategies.capabilities import Capabilities, capabilities
from strategies.cluster import find_cluster
from strategies.collectives import agree, any_worker, from_chief, sum_gradients
from strategies.division import Share, own_share, shares, take, whole
from strategies.registry import check_devices, create, names, register, split_cpu

__all__ = [
    "Capabilities",
    "Share",
    "agree",
    "any_worker",
    "capabilities",
    "check_devices",
    "create",
    "find_cluster",
    "from_chief",
    "names",
    "own_share",
    "register",
    "shares",
    "split_cpu",
    "sum_gradients",
    "take",
    "whole",
]

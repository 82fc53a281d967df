"""Finds the job that this process belongs to, from environment variables set by its scheduler."""

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from strategies import slurm

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver

KUBERNETES_SELECTOR = "HALFSTEP_WORKER_PODS"  # environment variable with a label selector
KUBERNETES_PORT = 8470


def find_cluster() -> Resolver | None:
    """Finds the job that this process belongs to.

    These sources are tried in order:

    - `TF_CONFIG`, TensorFlow's own environment variable, which lists every process of the job and
      says which of them this one is;
    - the variables that Slurm sets for each task of a step (`srun --ntasks=4 python ...`): all
      tasks are workers, and the tasks on one node divide its GPUs among themselves, unless Slurm
      has bound each to its own (`--gpus-per-task`, `--gpu-bind`);
    - `HALFSTEP_WORKER_PODS`, a Kubernetes label selector (`job-name=digits`) that finds the pods
      of all workers. Each pod must run on its own node and on that node's network, and `NODE_IP`
      must be the address of the node.

    Returns:
        A TensorFlow cluster resolver with the addresses of all processes and this process's
        task; None if this process does not belong to a job.

    Raises:
        ValueError: if the environment describes a job that cannot work.
        ImportError: if `HALFSTEP_WORKER_PODS` is used and the Kubernetes client is not installed.

    Example:
        >>> find_cluster() is None
        True
    """
    if os.environ.get("TF_CONFIG"):
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if slurm.in_step():
        return from_slurm()
    if os.environ.get(KUBERNETES_SELECTOR):
        return from_kubernetes(os.environ[KUBERNETES_SELECTOR])
    return None


def addresses_of(cluster: Resolver) -> dict[str, str]:
    """Returns the "HOST:PORT" of every process of a job, keyed by task, such as "worker 1"."""
    spec = cluster.cluster_spec()
    return {
        f"{kind} {index}": spec.task_address(kind, index)
        for kind in sorted(spec.jobs)
        for index in spec.task_indices(kind)
    }


def from_slurm() -> Resolver:
    """Returns the job whose workers are the tasks of this process's Slurm step.

    Raises:
        ValueError: if variables that Slurm sets for a step contradict each other.
    """
    workers, index, gpus = slurm.tasks_of_step()
    return fixed_resolver({"worker": workers}, index, {"GPU": len(gpus)} if gpus else {})


def from_kubernetes(selector: str) -> Resolver:
    """Returns the job whose workers are the pods that a label selector finds.

    Raises:
        ImportError: if the Kubernetes client is not installed.
        ValueError: if this pod is not one of those pods, or if two of them share a node.
    """
    from kubernetes import client, config  # noqa: PLC0415  # an extra

    if "KUBERNETES_SERVICE_HOST" in os.environ:  # set in every pod
        config.load_incluster_config()
    else:
        config.load_kube_config()
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        {"worker": [selector]}, tf_server_port=KUBERNETES_PORT, override_client=client.CoreV1Api()
    )
    workers = resolver.cluster_spec().as_dict()["worker"]
    node = os.environ.get("NODE_IP")
    own_address = f"{node}:{KUBERNETES_PORT}"
    if workers.count(own_address) != 1 or len(set(workers)) != len(workers):
        raise ValueError(f"`NODE_IP` must be the address of one pod of {workers}; got {node!r}")
    return fixed_resolver({"worker": workers}, workers.index(own_address), {})


def fixed_resolver(cluster: dict[str, Sequence[str]], index: int, accelerators: Any) -> Resolver:
    """Returns a resolver that always returns these addresses.

    TensorFlow's resolver for Kubernetes would look up the addresses again at each call.
    """
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster),
        task_type="worker",
        task_id=index,
        num_accelerators=accelerators,
        rpc_layer="grpc",
    )

"""Finds the job that this process belongs to, from environment variables set by its scheduler."""

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from absl import logging

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
    found = None
    if os.environ.get("TF_CONFIG"):
        found = from_tf_config(os.environ["TF_CONFIG"])
    elif slurm.in_step():
        found = from_slurm()
    elif os.environ.get(KUBERNETES_SELECTOR):
        found = from_kubernetes(os.environ[KUBERNETES_SELECTOR])
    if found and (public := find_public_address(found.cluster_spec().as_dict())):
        logging.warning(
            "The job uses the public address %s. TensorFlow's servers ask nobody for a password: "
            "whoever reaches the port can read files and run code as this user. Use addresses of a "
            "private network, or close the ports to all other machines.",
            public,
        )
    return found


def addresses_of(cluster: Resolver) -> dict[str, str]:
    """Returns the "HOST:PORT" of every process of a job, keyed by task, such as "worker 1"."""
    spec = cluster.cluster_spec()
    return {
        f"{kind} {index}": spec.task_address(kind, index)
        for kind in sorted(spec.jobs)
        for index in spec.task_indices(kind)
    }


def find_public_address(cluster: Mapping[str, Any]) -> str | None:
    """Returns the first address of a cluster that is a public IP address; None if there is none.

    Names of hosts are not looked up.

    Args:
        cluster: lists, or dicts, of addresses such as "10.0.0.1:8888", keyed by the kind of task.

    Example:
        >>> find_public_address({"worker": ["10.0.0.1:80", "localhost:80", "8.8.8.8:80"]})
        '8.8.8.8:80'
    """
    for tasks in cluster.values():
        for address in tasks.values() if isinstance(tasks, Mapping) else tasks:
            host = address.rpartition(":")[0].strip("[]")
            try:
                if ipaddress.ip_address(host).is_global:
                    return str(address)
            except ValueError:  # a name
                continue
    return None


def from_tf_config(text: str) -> Resolver:
    """Returns the job that a `TF_CONFIG` describes.

    The text is checked here because TensorFlow's own resolver accepts any text. The processes
    would then wait forever for addresses that do not exist.

    Raises:
        ValueError: if the text does not describe a job. The message says what is wrong.
    """
    problem = find_problem(text)
    if problem:
        raise ValueError(
            f"`TF_CONFIG` must list all processes of the job and say which one this is; got {text} "
            f"({problem}). The processes find each other through this variable. Set it, for "
            'example, to {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": '
            '{"type": "worker", "index": 0}}, or unset it to run a single process.'
        )
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def find_problem(text: str) -> str | None:
    """Returns what is wrong with a `TF_CONFIG`, or None if it is valid."""
    try:
        config = json.loads(text)
    except ValueError as error:
        return f"not valid JSON: {error}"
    try:
        cluster, task = config["cluster"], config["task"]
        addresses = [address for job in cluster.values() for address in job]
        if not re.fullmatch(r"[0-9]+", str(task["index"])):
            return f"the index is {task['index']!r}, and not a number from 0"
        own_address = cluster[task["type"]][int(task["index"])]
    except KeyError as error:
        return f"{error} is missing"
    except IndexError:
        return f"there is no {task['type']} {task['index']}"
    except (ValueError, TypeError, AttributeError):
        return "not in the form of the example"
    return find_bad_address(addresses) or (
        None if own_address else "the address of this process is missing"
    )


def find_bad_address(addresses: Sequence[Any]) -> str | None:
    """Returns what is wrong with the addresses of a job, or None if they are valid."""
    for address in addresses:
        if not (isinstance(address, str) and re.fullmatch(r"[^\s/]+:[0-9]+", address)):
            return f"{address!r} is not HOST:PORT"
        if not 0 < int(address.rpartition(":")[2]) < 2**16:
            return f"{address!r} has a port that is not from 1 to 65535"
        if addresses.count(address) > 1:
            return f"{address} is listed twice"
    return None


def from_slurm() -> Resolver:
    """Returns the job whose workers are the tasks of this process's Slurm step.

    Raises:
        ValueError: if variables that Slurm sets for a step are missing or contradict each other.
    """
    workers, index, gpus = slurm.tasks_of_step()
    return fixed_resolver({"worker": workers}, index, {"GPU": len(gpus)} if gpus else {})


def from_kubernetes(selector: str) -> Resolver:
    """Returns the job whose workers are the pods that a label selector finds.

    Raises:
        ImportError: if the Kubernetes client is not installed.
        ValueError: if this pod is not one of those pods, if two of them share a node, or if there
            is no Kubernetes.
    """
    try:
        from kubernetes import client, config  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ImportError(
            f"Cannot look up the workers of {KUBERNETES_SELECTOR}={selector!r}: the Kubernetes "
            "client is not installed. Run pip install 'halfstep[kubernetes]', or set TF_CONFIG, "
            "which is used instead."
        ) from error
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:  # set in every pod
            config.load_incluster_config()
        else:
            config.load_kube_config()
    except config.ConfigException as error:
        raise ValueError(
            f"Cannot look up the workers of {KUBERNETES_SELECTOR}={selector!r}: "
            f"{str(error).rstrip('.')}. Run this in a pod, or with a kubeconfig file; or unset "
            f"{KUBERNETES_SELECTOR} to run a single process."
        ) from error
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        {"worker": [selector]}, tf_server_port=KUBERNETES_PORT, override_client=client.CoreV1Api()
    )
    workers = resolver.cluster_spec().as_dict()["worker"]
    node = os.environ.get("NODE_IP")
    own_address = f"{node}:{KUBERNETES_PORT}"
    if workers.count(own_address) != 1 or len(set(workers)) != len(workers):
        raise ValueError(
            f"Cannot tell which worker this pod is: {KUBERNETES_SELECTOR}={selector!r} finds the "
            f"workers {workers}, and NODE_IP is {node!r}. Every worker needs its own node, and "
            "NODE_IP must be the address of this pod's node. In the pod template, set NODE_IP from "
            "the field status.hostIP, set hostNetwork: true, and keep pods of the job off each "
            "other's nodes with podAntiAffinity."
        )
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

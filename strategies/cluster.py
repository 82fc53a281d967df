"""The job that this process is part of, as its scheduler says it."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver

KUBERNETES = "HALFSTEP_WORKER_PODS"
# Where the processes of a Slurm step listen: the first one of a node here, and so on.
SLURM_PORT = 8888
KUBERNETES_PORT = 8470


def find_cluster() -> Resolver | None:
    """Finds the job that this process is part of.

    It looks, in this order, for

    - `TF_CONFIG`, TensorFlow's own variable, which names every process and which one this is;
    - what Slurm tells each process of a step (`srun --ntasks=4 python ...`): all are workers,
      who divide the GPUs of their node among them;
    - `HALFSTEP_WORKER_PODS`, a label selector of Kubernetes (`job-name=digits`), which finds the
      pods of all workers, one on each node and on its network; `NODE_IP` says which one is this.

    Returns:
        A resolver of TensorFlow's that knows the addresses of all and the task of this process;
        None where there is no job.

    Raises:
        ValueError: if what is said makes no job.
        ImportError: for Kubernetes, without its client.

    Example:
        >>> find_cluster() is None
        True
    """
    if os.environ.get("TF_CONFIG"):
        return from_tf_config(os.environ["TF_CONFIG"])
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return from_slurm()
    if os.environ.get(KUBERNETES):
        return from_kubernetes(os.environ[KUBERNETES])
    return None


def from_tf_config(text: str) -> Resolver:
    """Returns the job of a `TF_CONFIG`, or raises ValueError, which says what is wrong with it.

    TensorFlow's own resolver would be asked again and again, and hang where one waits in vain.
    """
    reason = wrong_in(text)
    if reason:
        raise ValueError(
            f"`TF_CONFIG` must name the processes of the job, and which one this is; got {text}: "
            f"{reason}. Without it they cannot find each other. Set it to for instance "
            '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": '
            '"worker", "index": 0}}, or unset it for one process.'
        )
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def wrong_in(text: str) -> str | None:
    """Returns what is wrong with a `TF_CONFIG`, or None."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        addresses = [each for job in cluster.values() for each in job]
        mine = cluster[task["type"]][int(task["index"])]
    except KeyError as error:
        return f"there is no {error}"
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        return str(error)
    for address in addresses:
        if not (isinstance(address, str) and re.fullmatch(r".+:\d+", address)):
            return f"{address!r} is no HOST:PORT"
        if addresses.count(address) > 1:
            return f"{address} stands there twice"
    return None if mine else "there is no address of this process"


def from_slurm() -> Resolver:
    """Returns the job of a Slurm step."""
    gpus = tf.config.list_physical_devices("GPU")
    try:
        if gpus:
            resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(port_base=SLURM_PORT)
            spec = resolver.cluster_spec()  # leaves each process its own GPUs
            index = resolver.task_id
            return known(spec.as_dict(), index, resolver.num_accelerators())
        # It divides the GPUs of a node, and where there are none, by zero.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=SLURM_PORT, gpus_per_node=2**20, gpus_per_task=1, auto_set_gpu=False
        )
        spec = resolver.cluster_spec()
    except (RuntimeError, ValueError) as error:
        told = {name: value for name, value in os.environ.items() if name.startswith("SLURM_STEP")}
        raise ValueError(
            f"`SLURM_STEP_...` must describe a step of several tasks; got {told}: {error} Without "
            "it they cannot find each other. Start them with srun, or set TF_CONFIG."
        ) from error
    return known(spec.as_dict(), resolver.task_id, {})


def from_kubernetes(selector: str) -> Resolver:
    """Returns the job of some pods."""
    try:
        from kubernetes import client, config  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ImportError(
            f"`{KUBERNETES}` must be unset without Kubernetes's client; got {selector!r}. It asks "
            "for the workers' addresses. Install halfstep[kubernetes], or set TF_CONFIG."
        ) from error
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # in a pod
        config.load_incluster_config()
    else:
        config.load_kube_config()
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        {"worker": [selector]}, tf_server_port=KUBERNETES_PORT, override_client=client.CoreV1Api()
    )
    workers = resolver.cluster_spec().as_dict()["worker"]
    mine = f"{os.environ.get('NODE_IP')}:{KUBERNETES_PORT}"
    if workers.count(mine) != 1 or len(set(workers)) != len(workers):
        raise ValueError(
            f"`{KUBERNETES}` must find the pods of all workers, each on a node of its own; got "
            f"{selector!r}, which gives {workers}, and NODE_IP {os.environ.get('NODE_IP')!r}. "
            "Without it they cannot find each other. Set NODE_IP to status.hostIP, and "
            "hostNetwork: true."
        )
    return known({"worker": workers}, workers.index(mine), {})


def known(cluster: dict[str, Sequence[str]], index: int, accelerators: Any) -> Resolver:
    """Returns a resolver of a job whose addresses are known: TensorFlow's own, when asked again."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster),
        task_type="worker",
        task_id=index,
        num_accelerators=accelerators,
        rpc_layer="grpc",
    )

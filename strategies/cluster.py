"""Where the processes of a job are, as the machine's own scheduler says it."""

import os
from collections.abc import Mapping

import tensorflow as tf

from strategies.checks import check_count

Resolver = tf.distribute.cluster_resolver.ClusterResolver
# How a port is chosen under Slurm, where a job says none: this one and those after it.
SLURM_PORT = 8888
# What says that this process is one of a job's, and what finds the others.
TF_CONFIG, SLURM, KUBERNETES = "TF_CONFIG", "SLURM_STEP_NUM_TASKS", "HALFSTEP_WORKER_PODS"


def find_cluster() -> Resolver | None:
    """Finds the job that this process is part of.

    It looks for, in this order:

    - `TF_CONFIG`, TensorFlow's own variable, which names every process and which one this is;
    - the variables that Slurm gives each process of a step (`srun --ntasks=4 python ...`), all of
      them workers; GPUs are divided over the processes of a node;
    - `HALFSTEP_WORKER_PODS`, a Kubernetes label selector ("job-name=digits") that finds the pods
      of all workers; `POD_IP` must say which is this one.

    Returns:
        TensorFlow's resolver, which knows the task of this process; None if it is alone.

    Raises:
        ValueError: if what is there is no cluster.
        ImportError: for Kubernetes, if its client is not installed.

    Example:
        >>> find_cluster() is None
        True
    """
    if os.environ.get(TF_CONFIG):
        return from_tf_config(os.environ)

"""Compiles a lowered step for a TPU, or runs it on emulated replicas: python compiled.py OUT WHAT.

WHAT is a TPU topology such as `v5e:2x2`: libtpu compiles the step for it, and the program prints a
line of JSON with its size in memory. Or WHAT is `run` or `run-poisoned`: the step runs on four
replicas that XLA emulates on the CPU, and `OUT/WHAT.npz` gets every output of every replica.
"""

import json
import os
import pathlib
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=10",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib.mlir import ir
from lowered_module import device_list, module_of, options

REPLICAS = 4


def compile_for(topology, module):
    """Compiles the step for a TPU and prints the size of its code and temporary memory."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    client = devices[0].client
    executable = client.compile(module, device_list(devices), options(devices))
    memory = executable.get_compiled_memory_stats()
    facts = {
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    print(json.dumps(facts))  # noqa: T201


def run(module, out, *, poisoned):
    """Runs the step; each replica gets its own index and the same global batch."""
    jax.config.update("jax_enable_x64", True)
    client = xla_bridge.get_backend("cpu")
    devices = client.local_devices()
    executable = client.compile_and_load(module, device_list(devices), options(devices))
    facts = json.loads((out / "facts.json").read_text())
    mesh = jax.sharding.Mesh(np.array(devices), ("replica",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with np.load(out / "arguments.npz") as saved:
        values = [saved[f"arr_{index}"] for index in range(len(saved.files))]
    if poisoned:
        for index in facts["targets"]:
            values[index][9] = np.inf
    arguments = []
    for index, value in enumerate(values):
        shards = [np.int32(r) if index == facts["replica"] else value for r in range(REPLICAS)]
        placed = [jax.device_put(*pair) for pair in zip(shards, devices, strict=True)]
        arguments.append(jax.make_array_from_single_device_arrays(value.shape, everywhere, placed))
    outputs = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    stacked = [np.stack([np.asarray(shard) for shard in each]) for each in outputs]
    np.savez(out / ("run-poisoned.npz" if poisoned else "run.npz"), *stacked)


def main(out, what):
    """Compiles or runs the step, as the command line asks."""
    with mlir.make_ir_context() as mlir_context, ir.Location.unknown(mlir_context):
        module = module_of(out / "step.hlo")
        if what.startswith("run"):
            run(module, out, poisoned=what == "run-poisoned")
        else:
            compile_for(what, module)
    sys.stdout.flush()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])

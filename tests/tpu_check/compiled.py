"""Compiles a lowered step, for a TPU or for four emulated replicas: python compiled.py OUT WHAT.

WHAT is a TPU topology, `v5e:2x2` say: libtpu compiles the step for it, and a line of JSON says
what it takes. Or it is `run` or `run-poisoned`: the step runs on four replicas that XLA
emulates on the CPU, and `OUT/WHAT.npz` keeps every output of each.
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
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies
from jaxlib.mlir import ir

REPLICAS = 4


def module_of(path):
    """The step as StableHLO, without the copies that libtpu does not know."""
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(path.read_bytes()))

    def all_in(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner.operation
                    yield from all_in(inner.operation)

    for operation in [each for each in all_in(module.operation) if each.name == "mhlo.copy"]:
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.erase()
    return module


def options(devices):
    """Four replicas, one on each device."""
    made = xla_client.CompileOptions()
    made.num_replicas = REPLICAS
    ids = np.array([device.id for device in devices]).reshape(REPLICAS, 1)
    made.device_assignment = xla_client.DeviceAssignment.create(ids)
    return made


def compile_for(topology, module):
    """Says what the compiled step takes."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    client = devices[0].client
    made = client.compile(module, _jax.DeviceList(tuple(devices)), options(devices))
    memory = made.get_compiled_memory_stats()
    facts = {
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    print(json.dumps(facts))  # noqa: T201


def run(module, out, *, poisoned):
    """Runs it, every replica with its number and the same global batch."""
    jax.config.update("jax_enable_x64", True)
    client = xla_bridge.get_backend("cpu")
    devices = client.local_devices()
    made = client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options(devices))
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
    outputs = made.execute_sharded(arguments).disassemble_into_single_device_arrays()
    stacked = [np.stack([np.asarray(shard) for shard in each]) for each in outputs]
    np.savez(out / ("run-poisoned.npz" if poisoned else "run.npz"), *stacked)


def main(out, what):
    """One of the three."""
    with mlir.make_ir_context() as here, ir.Location.unknown(here):
        module = module_of(out / "step.hlo")
        if what.startswith("run"):
            run(module, out, poisoned=what == "run-poisoned")
        else:
            compile_for(what, module)
    sys.stdout.flush()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])

"""Reads a lowered step with JAX's private names, for the programs that compile it.

The checks for TPUs and GPUs share it. It must be imported after the environment is set that JAX reads.
"""

import numpy as np
from jax._src.lib import _jax, xla_client
from jaxlib.mlir import ir


def module_of(path):
    """Returns the step as StableHLO, without `mhlo.copy`, which XLA's plugins do not support."""
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(path.read_bytes()))

    def nested(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner.operation
                    yield from nested(inner.operation)

    for operation in [each for each in nested(module.operation) if each.name == "mhlo.copy"]:
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.erase()
    return module


def options(devices):
    """Returns compile options for one replica on each device."""
    compile_options = xla_client.CompileOptions()
    compile_options.num_replicas = len(devices)
    ids = np.array([device.id for device in devices]).reshape(len(devices), 1)
    compile_options.device_assignment = xla_client.DeviceAssignment.create(ids)
    return compile_options


def device_list(devices):
    """Returns the devices as the compiler takes them."""
    return _jax.DeviceList(tuple(devices))

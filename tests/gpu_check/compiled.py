"""Compiles a lowered step for GPUs that are not there: python compiled.py OUT CARD REPLICAS [FAULT].

XLA's own compiler for GPUs compiles `OUT/step.hlo` for a card of `cards.py`, and writes

- `OUT/program.txt`: the compiled program as HLO, in the order of its schedule;
- `OUT/before.txt`: the same before XLA's passes for GPUs;
- `OUT/thunks.txt`: what the host is going to launch, and what is in a CUDA graph;
- `OUT/products.json`: the tensor-core instructions in the code of the program's own kernels;
- `OUT/memory.json`: the size of its arguments and temporary memory.

FAULT may be `outfeed`: the program also sends its first argument to the host. TensorFlow has no
operation for this, so it is added here.
"""

import collections
import json
import os
import pathlib
import re
import sys
import tempfile

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # cuDNN need not be installed
    # There is no card to try kernels on.
    "XLA_FLAGS": f"--xla_gpu_autotune_level=0 {os.environ.get('GPU_CHECK_FLAGS', '')}",
}

from cards import card_of
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib.mlir import ir
from lowered_module import device_list, module_of, options

# Tensor-core instructions of Ampere and Hopper, with the dtypes of result and operands.
TENSOR_CORE = re.compile(r"^\s*((?:wgmma\.mma_async|mma)\.sync\.\S+)", re.MULTILINE)


def compile_for(card, replicas, module, dump):
    """Returns the executable for so many cards; files about it go to the folder `dump`."""
    xla_bridge.canonicalize_platform = lambda _: "cuda"  # JAX asks for a real card
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=card_of(card).description(), topology=f"1x1x{replicas}"
    )
    devices = topology.devices
    compile_options = options(devices)
    found = compile_options.executable_build_options.debug_options
    found.xla_dump_to = str(dump)
    return devices[0].client.compile(module, device_list(devices), compile_options)


def products_in(dump):
    """Returns how often each tensor-core instruction stands in the code of the kernels."""
    found = collections.Counter()
    for file in dump.glob("*.ptx"):
        found.update(TENSOR_CORE.findall(file.read_text()))
    return found


def send_to_host(module):
    """Lets the program send its first argument to the host."""
    entry = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0]
    with ir.InsertionPoint(entry.operations[len(entry.operations) - 1]):
        token = ir.Type.parse("!stablehlo.token")
        made = ir.Operation.create("stablehlo.create_token", results=[token])
        operands = [entry.arguments[0], made.result]
        ir.Operation.create("stablehlo.outfeed", results=[token], operands=operands)


def newest(dump, ending):
    """Returns the text of the one file with this ending: that of the largest module."""
    return max((file.read_text() for file in dump.glob(f"*{ending}")), key=len)


def main(out, card, replicas, fault="none"):
    """Compiles the step and describes the program."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mlir.make_ir_context() as mlir_context,
        ir.Location.unknown(mlir_context),
    ):
        dump = pathlib.Path(folder)
        module = module_of(out / "step.hlo")
        if fault == "outfeed":
            send_to_host(module)
        executable = compile_for(card, replicas, module, dump)
        memory = executable.get_compiled_memory_stats()
        (out / "program.txt").write_text(executable.hlo_modules()[0].to_string())
        (out / "before.txt").write_text(newest(dump, "before_optimizations.txt"))
        (out / "thunks.txt").write_text(newest(dump, "thunk_sequence_after_thunk_passes.txt"))
        (out / "products.json").write_text(json.dumps(products_in(dump)))
        facts = {
            "temp": memory.temp_size_in_bytes,
            "arguments": memory.argument_size_in_bytes,
        }
        (out / "memory.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])

"""A kit for the day there is a card: compiled steps that run where TensorFlow is not.

    python benchmarks/gpu_kit.py pack KIT              # here; needs the extra gpu-check
    python benchmarks/gpu_kit.py run KIT RESULTS.json  # on the card's machine; needs JAX only
    python benchmarks/gpu_kit.py write RESULTS.json    # here: writes docs/performance.md's section

`pack` lowers the whole step of each model, as `jit_compile="step"` has XLA compile it, and records
what it computes here. A program has some hundred kB; weights and batches are not packed, but drawn
from a seed. To move the kit, copy KIT and this folder. `run` compiles the programs by the XLA of
JAX, checks losses and weights of a few steps against the record, and measures the step, the same
model in JAX (`in_jax.py`) and, if PyTorch is there, in PyTorch (`in_pytorch.py`), in turns. It also
runs on a CPU, to try the kit itself. Packing uses private names of JAX 0.10; running needs only
`jax.export`, and JAX 0.11 was tried too.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MODELS, DTYPES = ("mlp", "cnn", "resnet", "transformer"), ("float32", "bfloat16", "float16")
CHECKED_STEPS = 3
# Relative differences of losses and of norms of variables that rounding may make: another order of
# additions, and TensorFloat-32 in a card's products of float32.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.05}
NAMES = {"i1": "bool", "i32": "int32", "i64": "int64", "f16": "float16", "f32": "float32"}
NAMES |= {"bf16": "bfloat16", "ui32": "uint32", "ui64": "uint64"}
WINDOW, WORDS, WIDTH = 128, 256, 256  # the transformer's sizes, as in `models.py`


def main():
    """Packs, runs or writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    pack = commands.add_parser("pack")
    pack.add_argument("kit", type=pathlib.Path)
    pack.add_argument("--models", nargs="+", default=MODELS)
    pack.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    pack_one = commands.add_parser("pack_one")
    pack_one.add_argument("kit", type=pathlib.Path)
    pack_one.add_argument("model")
    pack_one.add_argument("dtype", choices=DTYPES)
    run = commands.add_parser("run")
    run.add_argument("kit", type=pathlib.Path)
    run.add_argument("results", type=pathlib.Path)
    run.add_argument("--rounds", type=int, default=20)
    run.add_argument("--turn_secs", type=float, default=0.5)
    write = commands.add_parser("write")
    write.add_argument("results", type=pathlib.Path)
    write.add_argument("--page", type=pathlib.Path, default=PAGE)
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    {"pack": pack_all, "pack_one": pack_case, "run": run_all, "write": write_page}[command](
        **arguments
    )


def pack_all(kit, models, dtypes):
    """Packs each model in each precision, in a process of its own."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
    environment = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for model in models:
        for dtype in dtypes:
            command = [sys.executable, __file__, "pack_one", str(kit), model, dtype]
            subprocess.run(command, env=environment, check=True)  # noqa: S603  # this program
            print(f"packed {model}, {dtype}", flush=True)


def pack_case(kit, model, dtype):
    """Writes `KIT/MODEL-DTYPE.mlir`, and what goes into and comes out of it as `.json`."""
    import tensorflow as tf
    from contenders import trainer_of
    from lowered_step import hlo_of
    from models import POLICIES, work_of

    kit.mkdir(parents=True, exist_ok=True)
    work = work_of(model)
    trainer, _ = trainer_of(work, POLICIES[dtype], jit_compile="step", seed=1)
    highest = WORDS if model == "transformer" else 10
    batch = [drawn_like(each, place, highest) for place, each in enumerate(work.batch)]
    drawn = draw_weights(trainer.model.trainable_variables)

    @tf.function(jit_compile=True, autograph=False)
    def program(*batch):
        report = trainer.train_step(batch)
        return report.loss, report.bits

    values = [tf.constant(made(each)) for each in batch]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in values]
    hlo, written = hlo_of(program, specs)
    taken = program.get_concrete_function(*specs).captured_inputs
    inputs = [*batch, *(described(value_of(each), drawn) for each in taken)]
    losses = [float(program(*values)[0]) for _ in range(CHECKED_STEPS)]
    ends = {argument: taken[argument - len(batch)] for argument, _ in written}
    case = {"model": model, "dtype": dtype, "inputs": inputs, "written": written}
    case |= {"losses": losses, "shapes": shapes_of(trainer.model, model)}
    case |= {"norms": [norm_of(value_of(ends[argument])) for argument, _ in written]}
    case["outputs"] = write_module(kit / f"{model}-{dtype}.mlir", hlo)
    (kit / f"{model}-{dtype}.json").write_text(json.dumps(case))


def shapes_of(network, model):
    """Returns the shapes of what `in_jax.py` takes: trained weights, and the rest."""
    shapes = [tuple(each.shape) for each in network.trainable_variables]
    if model == "transformer":
        return shapes, [(WINDOW, WIDTH)]
    return shapes, [tuple(each.shape) for each in network.non_trainable_variables]


def draw_weights(variables):
    """Draws all weights but vectors, which keep zeros and ones; returns how, by their bytes."""
    drawn = {}
    for place, variable in enumerate(variables):
        shape = tuple(variable.shape)
        if len(shape) > 1:
            how = drawn_weight(place, shape)
            variable.assign(made(how))
            drawn[variable.numpy().tobytes()] = how
    return drawn


def drawn_weight(place, shape):
    """Describes random weights of a layer."""
    bound = math.sqrt(6 / (math.prod(shape[:-1]) + shape[-1]))
    return {"shape": shape, "dtype": "float32", "within": bound, "seed": 100 + place}


def value_of(tensor):
    """Returns the value of a tensor, or of the variable that a resource stands for."""
    import tensorflow as tf

    if tensor.dtype == tf.resource:
        dtype = tensor._handle_data.shape_and_type[0].dtype  # noqa: SLF001
        tensor = tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype)
    return tensor.numpy()


def drawn_like(array, place, highest):
    """Describes an input of a batch like this one: numbers from 0 to 1, or below `highest`."""
    how = {"shape": array.shape, "dtype": str(array.dtype), "seed": place}
    return how | ({"from": 0, "within": 1} if array.dtype.kind == "f" else {"below": highest})


def described(value, drawn):
    """Describes an array that was drawn, or whose elements are all the same, or few."""
    if value.tobytes() in drawn:
        return drawn[value.tobytes()]
    same = value.size and (value == value.flat[0]).all()
    if not same and value.size > 50_000:
        raise ValueError(f"an input of shape {value.shape} is neither drawn nor constant")
    numbers = value.flat[0].item() if same else value.tolist()
    return {"shape": value.shape, "dtype": str(value.dtype), "values": numbers}


def made(how):
    """Returns the array that a description describes."""
    import numpy as np

    shape, dtype = how["shape"], how["dtype"]
    if "values" in how:
        return np.broadcast_to(np.asarray(how["values"], dtype), shape).copy()
    generator = np.random.default_rng(how["seed"])
    if "below" in how:
        return generator.integers(how["below"], size=shape).astype(dtype)
    low = how.get("from", -how["within"])
    return (low + (how["within"] - low) * generator.random(shape)).astype(dtype)


def norm_of(array):
    """Returns the 2-norm of an array, as a number."""
    import numpy as np

    return float(np.sqrt(np.square(np.asarray(array, np.float64)).sum()))


def write_module(path, hlo):
    """Writes HLO as StableHLO, which JAX can compile for any device; returns what comes out."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # else it looks for a card
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo
    from lowered_module import module_of

    path.write_bytes(hlo)
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        module = module_of(path)
        [program] = [each for each in module.body if each.sym_name.value == "main"]
        results = [ir.RankedTensorType(each) for each in program.type.results]
        artifact = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
        path.write_bytes(artifact)
        return [{"shape": each.shape, "dtype": NAMES[str(each.element_type)]} for each in results]


class Packed:
    """A packed step, for JAX's first device."""

    def __init__(self, path):
        """Makes the inputs, and compiles the program."""
        import jax

        self.path = path
        self.case = json.loads(path.with_suffix(".json").read_text())
        self.inputs = [jax.device_put(made(each)) for each in self.case["inputs"]]
        self.batch = [
            made(each) for each in self.case["inputs"] if "below" in each or "from" in each
        ]
        overwritten = tuple(argument for argument, _ in self.case["written"])
        step = jax.jit(self.exported().call, donate_argnums=overwritten)
        self.program = step.lower(*self.inputs).compile()

    def exported(self):
        """Returns the program as JAX exports one: in place of that of a function like it."""
        import jax
        import jax.numpy as jnp

        def like_it(*_):
            return [jnp.zeros(each["shape"], each["dtype"]) for each in self.case["outputs"]]

        found = jax.export.export(jax.jit(like_it, keep_unused=True))(*self.inputs)
        return dataclasses.replace(found, mlir_module_serialized=self.path.read_bytes())

    def step(self):
        """Takes a step; returns what it returns, and keeps what it writes."""
        outputs = self.program(*self.inputs)
        for argument, output in self.case["written"]:
            self.inputs[argument] = outputs[output]
        return outputs

    def take(self, steps):
        """Takes some steps, and waits for the last."""
        for _ in range(steps):
            outputs = self.step()
        outputs[0].block_until_ready()

    def differences(self):
        """Takes the first steps; returns how far losses and norms are from those of `pack`.

        Norms are those of matrices and kernels. The bias of a layer in front of a normalization has
        a gradient that is all rounding, by whose sign Adam moves it.
        """
        losses = [float(self.step()[0]) for _ in range(CHECKED_STEPS)]
        written = zip(self.case["written"], self.case["norms"], strict=True)
        norms = [
            (norm_of(self.inputs[argument]), recorded)
            for (argument, _), recorded in written
            if len(self.case["inputs"][argument]["shape"]) > 1
        ]
        pairs = {"loss": [*zip(losses, self.case["losses"], strict=True)], "norm": norms}
        return {
            name: max(abs(now - recorded) / max(abs(recorded), 1e-6) for now, recorded in each)
            for name, each in pairs.items()
        }


def run_all(kit, results, rounds, turn_secs):
    """Checks and measures every packed step; writes a file of results."""
    import jax
    from turns import in_turn

    jax.config.update("jax_enable_x64", val=True)  # counters have 64 bits
    device = jax.devices()[0]
    found = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    found["cases"] = {}
    paths = sorted(kit.glob("*.mlir"))
    with concurrent.futures.ThreadPoolExecutor(max_workers=(os.cpu_count() + 1) // 2) as pool:
        compiled = pool.map(lambda path: (packed := Packed(path), jax_loop(packed)), paths)
        compiled = list(compiled)
    wrong = []
    for path, (packed, in_jax) in zip(paths, compiled, strict=True):
        model, dtype = packed.case["model"], packed.case["dtype"]
        apart = packed.differences()
        if not max(apart.values()) <= TOLERANCE[dtype]:
            wrong.append(f"{path} does not compute what it did where it was packed: {apart}")
            continue
        turns = in_turn(contenders_of(packed, in_jax), rounds, turn_secs)
        found["cases"][f"{model}, {dtype}"] = {"apart": apart, "turns": turns}
        results.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{model}, {dtype}: as packed, measured {', '.join(turns)}", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))


def contenders_of(packed, in_jax):
    """Returns the packed step, the model in JAX, and that in PyTorch if it is there."""
    import importlib.util

    from turns import Contender

    model, dtype = packed.case["model"], packed.case["dtype"]
    found = {"halfstep": Contender(packed.take), "JAX": Contender(in_jax)}
    if importlib.util.find_spec("torch"):
        import in_pytorch
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = in_pytorch.build(model, WORDS, WINDOW, WIDTH).to(device)
        take = in_pytorch.steps_of(network, packed.batch, dtype, device)
        found["PyTorch"] = Contender(take)
    return found


def jax_loop(packed):
    """Returns a function that takes steps of the model in JAX, compiled for the same batch."""
    import jax
    import numpy as np
    from in_jax import state_of, step_of

    model, dtype = packed.case["model"], packed.case["dtype"]
    batch = jax.device_put(tuple(packed.batch))
    trained, statistics = (
        [
            made(drawn_weight(place, shape)) if len(shape) > 1 else np.ones(shape, np.float32)
            for place, shape in enumerate(shapes)
        ]
        for shapes in packed.case["shapes"]
    )
    state = state_of(trained, statistics)
    step = jax.jit(step_of(model, dtype), donate_argnums=0).lower(state, batch).compile()

    def take(steps):
        nonlocal state
        for _ in range(steps):
            state, loss = step(state, batch)
        loss.block_until_ready()

    return take


def write_page(results, page):
    """Writes what was measured into the page, between this script's markers."""
    import statistics

    from turns import ratios_of, table, with_interval, write_between

    found = json.loads(results.read_text())
    head = ["model, dtype", "halfstep, ms", "JAX, ms", "PyTorch, ms", "against JAX (95%)"]
    rows = [[*head, "against PyTorch (95%)", "losses differ by"]]
    for name, case in found["cases"].items():
        turns = case["turns"]
        cells = [
            f"{statistics.median(turns[each]):.3g}" if each in turns else ""
            for each in ("halfstep", "JAX", "PyTorch")
        ]
        cells += [
            with_interval(ratios_of(turns, "halfstep", each)) if each in turns else ""
            for each in ("JAX", "PyTorch")
        ]
        rows.append([name, *cells, f"{case['apart']['loss']:.1e}"])
    title = f"### {found['device']}, JAX {found['jax']}"
    if found["platform"] == "cpu":
        title += "\n\nThis is a trial of the kit on a CPU. It says nothing about GPUs."
    write_between(page, "gpu_kit.py", f"{title}\n\n{table(rows)}")


if __name__ == "__main__":
    main()

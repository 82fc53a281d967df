"""Reads a program that XLA compiled for a GPU: its kernels, what they move, and who reads verdicts.

A kernel is an instruction that launches work on the card: a fusion, a library's call, a copy, a
collective; one in a loop counts with each turn. Its bytes are those of its operands and results, as shapes tell; what a cache saves is not
known. A conditional counts with one branch: the one that applies the update, else the larger one.
"""

import math
import re
from typing import NamedTuple

SIZES = {"pred": 1, "f64": 8, "c64": 8, "c128": 16, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1} | {
    f"{kind}{bits}": bits // 8 for kind in "sufc" for bits in (8, 16, 32, 64)
}
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(ROOT )?%(?P<name>[\w.-]+) = (?P<rest>.*)")
CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|body|condition|called_computations?)=\{?%([\w.-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
NOTHING = {
    *("after-all", "all-reduce-done", "async-done", "bitcast", "constant", "copy-done"),
    *("get-tuple-element", "parameter", "tuple"),
}
CONTROL = {"call", "conditional", "while", "async-start"}
CONVOLUTIONS = {
    # The custom call's name -> which of (result, first operand, second operand) is the output of the
    # convolution that a layer computes, or its gradient; and which one is the kernel.
    "__cudnn$convForward": (0, 2),
    "__cudnn$convForwardGraph": (0, 2),
    "__cudnn$convBiasActivationForward": (0, 2),
    "__cudnn$convBackwardFilter": (2, 0),
    "__cudnn$convBackwardInput": (1, 2),
}
# What the host does for a program that asks it for nothing: see `host_work`.
DEVICE_WORK = {
    *(
        "kAllReduce",
        "kAsyncDone",
        "kAsyncStart",
        "kCommandBuffer",
        "kConditional",
        "kConvolution",
        "kCopy",
        "kCustomKernel",
    ),
}
HOST = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
HALF = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


class Array(NamedTuple):
    """A dtype and a shape, as HLO writes them."""

    dtype: str
    shape: tuple

    @property
    def size(self):
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self):
        """The size in memory."""
        return self.size * SIZES.get(self.dtype, 0)


class Instruction(NamedTuple):
    """An instruction of the program."""

    name: str
    opcode: str
    arrays: list  # of its result
    operands: list  # their names
    index: str  # of a parameter
    called: list  # the computations that it calls, by name
    text: str  # what stands after its operands

    @property
    def bytes(self):
        """The size of its result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def target(self):
        """The name of the library's function that a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""


class Product(NamedTuple):
    """A product or convolution."""

    name: str
    operands: tuple  # dtypes
    result: str  # dtype
    flops: int
    convolution: bool


def closing(text):
    """Returns the index after the parenthesis that closes the one at the beginning of the text."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"not closed: {text[:100]}")


def instruction_of(name, rest):
    """Reads what stands after the equals sign of an instruction."""
    end = closing(rest) if rest.startswith("(") else rest.index(" ")
    arrays = [
        Array(dtype, tuple(int(each) for each in sizes.split(",") if each))
        for dtype, sizes in ARRAY.findall(rest[:end])
    ]
    opcode, _, after = rest[end:].strip().partition("(")
    end = closing(f"({after}") - 2
    branches = [each.strip(" %") for found in BRANCHES.findall(after) for each in found.split(",")]
    operands = re.findall(r"%([\w.-]+)", after[:end])
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=arrays,
        operands=operands,
        index=after[:end],
        called=CALLED.findall(after) + branches,
        text=after[end:],
    )


def flops_of(product, operands):
    """Returns the additions and multiplications of a product or a convolution.

    Args:
        product: the instruction.
        operands: its two operands, arrays.
    """
    if product.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.text)[1].split(",")
        return 2 * product.arrays[0].size * math.prod(operands[0].shape[int(i)] for i in summed)
    labels = re.search(r"dim_labels=\w+?_(\w+)->\w+", product.text)[1]
    values = [product.arrays[0], *operands]
    output, kernel = (values[index] for index in CONVOLUTIONS.get(product.target, (0, 2)))
    return 2 * output.size * kernel.size // kernel.shape[labels.index("o")]


class Program:
    """A compiled program."""

    def __init__(self, text):
        """Reads the text of an HLO module."""
        self.text = text
        self.computations = {}
        self.entry = ""
        for line in text.splitlines():
            heading = re.match(r"(ENTRY )?%([\w.-]+) \(", line)
            if heading:
                name = heading[2]
                self.computations[name] = {}
                self.entry = name if heading[1] else self.entry
            elif found := INSTRUCTION.match(line):
                made = instruction_of(found["name"], found["rest"])
                self.computations[name][made.name] = made

    def instructions(self):
        """Yields every instruction, each with the computation that it stands in."""
        for computation in self.computations.values():
            for instruction in computation.values():
                yield computation, instruction

    def count(self, *opcodes):
        """Returns the number of instructions with one of these opcodes."""
        return sum(each.opcode in opcodes for _, each in self.instructions())

    def kernels(self, name=None):
        """Yields what the card is given to do in one step, each with its computation."""
        computation = self.computations[name or self.entry]
        for instruction in computation.values():
            if instruction.opcode == "conditional":
                yield from self.kernels(self.taken(instruction))
            elif instruction.opcode in CONTROL:
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.text)
                for _ in range(int(turns[1]) if turns else 1):
                    for called in instruction.called:
                        yield from self.kernels(called)
            elif instruction.opcode not in NOTHING:
                yield computation, instruction

    def taken(self, conditional):
        """Returns the branch of a conditional that a step takes if nothing is wrong."""
        updates = [name for name in conditional.called if self.reaches(name, "/adam/")]
        return (updates or sorted(conditional.called, key=self.moved))[-1]

    def reaches(self, name, words):
        """Returns whether a computation, or one that it calls, has these words in its metadata."""
        return any(
            words in each.text or any(self.reaches(called, words) for called in each.called)
            for each in self.computations[name].values()
        )

    def moved(self, name=None):
        """Returns the bytes that one step's kernels read and write."""
        return sum(self.moved_by(*each) for each in self.kernels(name))

    def moved_by(self, computation, kernel):
        """Returns the bytes that a kernel reads and writes."""
        if kernel.opcode == "fusion":
            read = self.read_by_fusion(computation, kernel)
        else:
            read = sum(computation[each].bytes for each in {*kernel.operands})
        return read + kernel.bytes

    def read_by_fusion(self, computation, kernel):
        """Returns the bytes that a fusion reads: of an operand that it only slices, the slices."""
        inner = self.computations[kernel.called[0]]
        total = {}
        for each in inner.values():
            if each.opcode != "parameter":
                continue
            outer = kernel.operands[int(each.index)]
            users = [user for user in inner.values() if each.name in user.operands]
            sliced = users and all(
                user.opcode in {"slice", "dynamic-slice", "gather"}
                and user.operands[0] == each.name
                for user in users
            )
            total[outer] = sum(u.bytes for u in users) if sliced else computation[outer].bytes
        return sum(total.values())

    def flops_by(self, computation, kernel):
        """Returns the additions and multiplications of the products in a kernel."""
        inner = [self.computations[name] for name in kernel.called if kernel.opcode == "fusion"]
        places = [(each, found) for each in inner for found in each.values()]
        return sum(each.flops for each in self.products([(computation, kernel), *places]))

    def roofline(self, card, dtype):
        """Returns the seconds that the kernels take at least.

        Args:
            card: a `cards.Card`.
            dtype: what the products are computed in, for the card's rate.
        """
        return sum(
            max(
                self.moved_by(*each) / card.memory_bandwidth,
                self.flops_by(*each) / card.peak[dtype],
            )
            for each in self.kernels()
        )

    def products(self, instructions=None):
        """Returns products and convolutions, in kernels and by libraries.

        Args:
            instructions: where to look, each with its computation; default: everywhere.
        """
        found = []
        for computation, each in instructions or self.instructions():
            if each.opcode in {"dot", "convolution"} or each.target in CONVOLUTIONS:
                operands = [computation[name].arrays[0] for name in each.operands[:2]]
                found.append(
                    Product(
                        name=each.name,
                        operands=tuple(operand.dtype for operand in operands),
                        result=each.arrays[0].dtype,
                        flops=flops_of(each, operands),
                        convolution=each.opcode != "dot",
                    )
                )
        return found

    def all_reduces(self):
        """Returns the all-reduces, in the order of the schedule."""
        return [
            each
            for _, each in self.instructions()
            if each.opcode in {"all-reduce", "all-reduce-start"}
        ]

    def computed_while_summing(self):
        """Returns the bytes of what is computed between the start and the end of an all-reduce."""
        found = 0
        for computation in self.computations.values():
            summing = False
            for each in computation.values():
                summing &= each.opcode != "all-reduce-done"
                found += each.bytes if summing else 0
                summing |= each.opcode == "all-reduce-start"
        return found


class Launch(NamedTuple):
    """What the host launches: a graph, or work that is in none."""

    depth: int  # 0 for what it launches in every step, and more inside graphs and branches
    kind: str


def launches(text):
    """Reads what the host launches, in order.

    Args:
        text: XLA's dump of a program's thunks.
    """
    found = re.findall(r"^( *)\d+: (k\w+)", text, re.MULTILINE)
    return [Launch(len(spaces) // 4, kind) for spaces, kind in found]


def host_reads(program, found):
    """Returns how often in a step that goes well the host waits to read a predicate from the card.

    The card decides a condition in a CUDA graph, and the host one outside of all graphs. It also
    decides how often a loop turns, unless the program says so.
    """
    kinds = [each.kind for each in found if each.depth == 0]
    loops = [each for _, each in program.instructions() if each.opcode == "while"]
    unknown = sum("known_trip_count" not in each.text for each in loops)
    return kinds.count("kConditional") + min(unknown, kinds.count("kWhile"))


def host_work(program, found):
    """Returns everything in a program that moves data to or from the host."""
    return [
        *(each.text for _, each in program.instructions() if each.opcode in HOST),
        *(each.target for _, each in program.instructions() if "callback" in each.target),
        *re.findall(r"\S+\{[\d,]*:S\(5\)\}", program.text),  # an array in the host's memory
        *(each.kind for each in found if each.kind not in DEVICE_WORK),
    ]

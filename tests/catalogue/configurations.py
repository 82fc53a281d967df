"""The configurations in which a class is tried."""

import dataclasses
import itertools
import zlib

from catalogue.rows import Row

SALT = "1"  # with which every configuration is some layer's


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Where and how a step runs."""

    replicas: int
    num_microbatches: int
    jit_compile: bool | str
    precision: str

    def __str__(self) -> str:
        """As the page says it."""
        mode = {False: "plain", True: "XLA"}.get(self.jit_compile, self.jit_compile)
        return f"{self.replicas} x {self.num_microbatches}, {mode}, {self.precision}"

    @property
    def with_xla(self) -> bool:
        """Whether XLA compiles the forward and backward passes."""
        return self.jit_compile in (True, "step")

    def as_one_program(self) -> "Configuration":
        """The configuration in which XLA compiles the whole step, where it is all on one replica."""
        alone = (self.replicas, self.num_microbatches) == (1, 1) and self.jit_compile is True
        return dataclasses.replace(self, jit_compile="step") if alone else self


PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
ALL = [
    Configuration(*each)
    for each in itertools.product((1, 3), (1, 2), (False, True, "elementwise"), PRECISIONS)
]


def of_class(name: str, row: Row) -> Configuration:
    """The configuration in which a class is tried when each is tried once."""
    allowed = [each for each in ALL if row.allows(each)]
    return allowed[zlib.crc32((SALT + name).encode()) % len(allowed)]


def nine_of_class(name: str, row: Row) -> list[Configuration]:
    """Nine configurations, or fewer, in which every value of an axis meets every value of another;
    over the classes, they are all. Where XLA compiles a step on one replica, it compiles all of it.
    """
    turn = zlib.crc32((SALT + name).encode())
    modes, parts = (False, True, "elementwise"), ((1, 1), (3, 1), (1, 2), (3, 2))
    chosen = [
        Configuration(
            *parts[(turn + 3 * mode + precision) % 4], modes[mode], PRECISIONS[precision]
        ).as_one_program()
        for mode in range(3)
        for precision in range(3)
    ]
    return [each for each in chosen if row.allows(each)]

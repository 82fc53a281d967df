"""Random models made of the classes in the catalogue, for relations that hold for every model."""

import dataclasses
import functools
import random
import zlib

import keras
import numpy as np
from catalogue import models
from catalogue.entries import entries
from catalogue.features import features
from catalogue.rows import DRAWS, RIGHT, SHARES
from hypothesis import HealthCheck, Phase, given, seed, settings

OF_MODELS = {"keras.layers", "keras.regularizers", "keras.constraints", "keras.initializers"}
# A float8 layer's scales follow the gradients that it is given, which a loss scale multiplies.
LEFT_OUT = {'features.`quantize("float8")`'}


@dataclasses.dataclass(frozen=True)
class Joined:
    """A model with one branch for each of several classes, and its batches.

    Attributes:
        names: of the classes.
        cases: drawn for them.
        seed: of the weights and the data.
        size: number of examples in a batch.
    """

    names: tuple[str, ...]
    cases: tuple[models.Case, ...]
    seed: int
    size: int

    @functools.cached_property
    def _adds_loss(self):
        """Whether the model has losses after a call."""
        model, [batch] = self.build(), self.batches(1)
        model({name: batch[name] for name in batch if name.startswith("x")}, training=True)
        return bool(model.losses)

    def has(self, flag):
        """Whether any of the classes has a flag of `random_models.Kind`."""
        if flag == "adds_loss":
            return self._adds_loss
        wanted = {"random": DRAWS, "couples": SHARES}[flag]
        return any(case.row.compared_with == wanted for case in self.cases)

    @property
    def in_graph(self):
        """Whether it cannot run eagerly."""
        return any(case.row.in_graph for case in self.cases)

    @property
    def xla(self):
        """Whether XLA can compile it."""
        return not any(case.row.no_xla or case.row.xla_lacks for case in self.cases)

    @property
    def coarseness(self):
        """How much more it rounds than float32 does: a class may compute in half precision."""
        return 256 if any(case.row.rounds_to for case in self.cases) else 1

    def build(self):
        """A new model with the same initial weights every time."""
        keras.utils.set_random_seed(self.seed)
        inputs, outputs = {}, []
        for index, case in enumerate(self.cases):
            branch, joined = models.branch(case, index)
            inputs |= {each.name: each for each in branch}
            outputs.append(joined)
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()(outputs)))

    def batches(self, count):
        """Batches of inputs, targets and positive weights, one of them 0."""
        random = np.random.default_rng(self.seed)
        found = []
        for _ in range(count):
            batch = {
                f"x{index}_{place}": values
                for index, case in enumerate(self.cases)
                for place, values in enumerate(models.inputs_of(case, random, self.size))
            }
            weights = random.choice([0.5, 1.0, 2.0, 3.0], self.size).astype(np.float32)
            weights[random.integers(self.size)] = 0.0
            target = random.standard_normal([self.size, 2]).astype(np.float32)
            found.append(batch | {"target": target, "weight": weights})
        return found


def drawn(entry, turn):
    """One random case of an entry."""
    found = []

    @seed(zlib.crc32(f"{entry} {turn}".encode()))
    @settings(
        max_examples=1,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(models.cases(entry.cls, entry.row))
    def take(case):
        found.append(case)

    take()
    return found[-1]


def joined(turn):
    """Yields models that together have every class of the catalogue that trains, in pairs.

    Args:
        turn: of which pairs and sizes: another turn has others.
    """
    of_models = [each for each in entries() if each.room in OF_MODELS]
    listed = [
        each
        for each in [*of_models, *features()]
        if each.row.verdict == RIGHT and str(each) not in LEFT_OUT
    ]
    shuffle = random.Random(turn)  # noqa: S311
    shuffle.shuffle(listed)
    for index in range(0, len(listed), 2):
        pair = listed[index : index + 2]
        yield Joined(
            tuple(str(each) for each in pair),
            tuple(drawn(each, turn) for each in pair),
            shuffle.randrange(2**16),
            shuffle.randrange(5, 10),
        )

"""All classes that Keras makes public in the modules of the catalogue, each with its row."""

import dataclasses
import inspect

import keras
from catalogue.layers import LAYERS
from catalogue.losses import LOSSES, METRICS
from catalogue.others import CONSTRAINTS, INITIALIZERS, OPTIMIZERS, REGULARIZERS, SCHEDULES
from catalogue.rows import Row

# Module -> (its name for readers, its rows).
GROUPS = {
    keras.layers: ("keras.layers", LAYERS),
    keras.losses: ("keras.losses", LOSSES),
    keras.metrics: ("keras.metrics", METRICS),
    keras.optimizers: ("keras.optimizers", OPTIMIZERS),
    keras.optimizers.schedules: ("keras.optimizers.schedules", SCHEDULES),
    keras.regularizers: ("keras.regularizers", REGULARIZERS),
    keras.constraints: ("keras.constraints", CONSTRAINTS),
    keras.initializers: ("keras.initializers", INITIALIZERS),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A class, or another feature, with its row."""

    group: str
    name: str
    cls: type | None
    row: Row

    def __str__(self) -> str:
        """The full name."""
        return f"{self.group}.{self.name}"


def public_classes(module):
    """A module's classes, keyed by name. A class with several names is there once."""
    names = {}
    for name, value in inspect.getmembers(module, inspect.isclass):
        names.setdefault(value, []).append(name)
    return {
        cls.__name__ if cls.__name__ in found else found[0]: cls for cls, found in names.items()
    }


def missing_and_strays():
    """Public classes without a row, and rows without a public class."""
    found = {
        f"{group}.{name}"
        for module, (group, _) in GROUPS.items()
        for name in public_classes(module)
    }
    rows = {f"{group}.{name}" for group, rows in GROUPS.values() for name in rows}
    return sorted(found - rows), sorted(rows - found)


def entries():
    """All classes that have a row, in the order of the page."""
    return [
        Entry(group, name, classes[name], rows[name])
        for module, (group, rows) in GROUPS.items()
        for classes in [public_classes(module)]
        for name in sorted(rows.keys() & classes.keys())
    ]

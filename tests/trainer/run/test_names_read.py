"""What the code of methods reads: attributes of their object, and values outside of it."""

from trainer.run.names_read import chains_of, reads_of, values_outside

NUMBER, COUNTS, NOTES = 1.0, {}, []


class Base:
    """A class to which others add methods."""

    def run(self):
        """Reads nothing."""


class Reader(Base):
    """Reads and changes attributes, and what is in this module."""

    def run(self):
        """Calls another method."""
        self.assigned = self.helped() + self.read["a"]
        self.appended.append(NUMBER)
        self.counted["a"] += 1
        self.replaced["a"] = self.key
        NOTES.append(1)
        COUNTS["a"] = [self.inner for _ in range(2)]
        return self.assigned

    def helped(self):
        """Is called by a method."""
        return super().run() or self.through

    def other(self):
        """Is not called."""
        return self.unread


def test_what_methods_read_and_do_not_change():
    """Through other methods and inner functions; items that are changed count as changes."""
    names = reads_of(Reader, Base, ("run",)).names
    assert names & {*"abcdefg"} == frozenset()
    assert {"read", "key", "through", "inner"} <= names
    assert not names & {"assigned", "appended", "counted", "replaced", "unread"}
    functions = reads_of(Reader, Base, ("run",)).functions
    assert {function.__name__ for function in functions} == {"run", "helped"}


def test_what_a_function_reads_outside():
    """Of its module and its closure, but not what it changes there."""
    factor, count = 2.0, 0

    def function():
        nonlocal count
        count += 1
        return factor * NUMBER

    assert values_outside(function) == {"factor": 2.0, "NUMBER": 1.0}
    assert values_outside(Reader.run).keys() & {"NUMBER", "NOTES", "COUNTS"} == {"NUMBER"}


def test_chains_say_what_is_read_of_what():
    """Attributes and constant keys, also by another name; a name that is assigned again is new."""

    def reading(self, other):
        table = self.args.table
        found = table["a"] + self.args.scale
        table = other
        return found * table.size

    assert chains_of([reading]) == {
        ("self", "args"),
        ("args", "table"),
        ("table", "'a'"),
        ("args", "scale"),
        ("other", "size"),
    }

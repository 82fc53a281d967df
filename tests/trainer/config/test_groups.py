"""Settings groups, the arguments of `Trainer` and its docstring agree: one default, one check, one
text for each setting.
"""

import dataclasses
import inspect
import pathlib
import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scaling
from trainer import Trainer
from trainer.config import checkpoint_config, groups, skip_policy
from trainer.config.fields import CHECK, CHOICES, LOWER_BOUND, argument_texts
from trainer.config.groups import MonitorConfig, PrecisionConfig, RunConfig, UpdateConfig
from trainer.flags import GROUPS
from trainer.step import Clip

# These are not settings.
TASK_ARGUMENTS = {"model", "optimizer", "loss_fn", "loss_weights", "class_weight", "metrics"}
PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(Trainer).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
FIELDS = [(group, field) for group in GROUPS for field in dataclasses.fields(group)]
NAMES = [field.name for _, field in FIELDS]


def fields_with(key):
    """The fields that have some metadata, by name."""
    return {field.name: (group, field) for group, field in FIELDS if key in field.metadata}


def test_every_group_is_listed():
    """`GROUPS` holds all settings groups that the modules define."""
    defined = {
        found
        for module in (groups, checkpoint_config, skip_policy)
        for found in vars(module).values()
        if isinstance(found, type)
        and dataclasses.is_dataclass(found)
        and found.__module__ == module.__name__
    }

    assert set(GROUPS) == defined


def test_every_setting_is_in_exactly_one_group():
    """The arguments of `Trainer` are those of a task and the fields of the groups."""
    assert len(NAMES) == len(set(NAMES))
    assert set(PARAMETERS) == TASK_ARGUMENTS | set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_of_an_argument_is_that_of_its_field(name):
    """The two defaults are the same object, not only equal."""
    [field] = [field for _, field in FIELDS if field.name == name]

    assert PARAMETERS[name].default is field.default


def test_the_docstring_describes_every_argument():
    """`Trainer`'s docstring has a text for each argument, in their order, and for nothing else."""
    assert list(argument_texts(Trainer)) == list(PARAMETERS)


@pytest.mark.parametrize("group", GROUPS)
def test_defaults_pass_the_checks(group):
    """Every group can be made without arguments, and cannot be changed afterwards."""
    made = group()
    name = dataclasses.fields(group)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_checked(name):
    """No argument accepts an arbitrary object, and the error begins with the argument's name."""
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        Trainer(**{name: object()})


@given(st.data(), st.sampled_from(sorted(fields_with(LOWER_BOUND))))
def test_counts_below_their_bound_are_refused(data, name):
    """A count is an int of at least 1 (or 0); bools, fractions and text are refused as well."""
    group, field = fields_with(LOWER_BOUND)[name]
    below = st.integers(max_value=field.metadata[LOWER_BOUND] - 1)
    bad = data.draw(below | st.floats() | st.text() | st.booleans())

    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        group(**{name: bad})


@given(st.sampled_from(sorted(fields_with(LOWER_BOUND))), st.integers(0, 10**9))
def test_counts_from_their_bound_up_are_accepted(name, excess):
    """A count has no upper bound."""
    group, field = fields_with(LOWER_BOUND)[name]
    value = field.metadata[LOWER_BOUND] + excess

    assert getattr(group(**{name: value}), name) == value


@given(st.data(), st.sampled_from(sorted(fields_with(CHOICES))))
def test_only_the_choices_are_accepted(data, name):
    """Each choice is accepted, and any other text is refused."""
    group, field = fields_with(CHOICES)[name]
    several = field.default == ()
    choices = field.metadata[CHOICES]
    other = data.draw(st.text().filter(lambda text: text not in choices))

    for value in choices:
        group(**{name: [value] if several else value})
    with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
        group(**{name: [other] if several else other})


@pytest.mark.parametrize("name", fields_with(CHECK))
def test_none_is_accepted_where_the_type_says_so(name):
    """Any other field refuses None, and every field whose default is None accepts it."""
    group, field = fields_with(CHECK)[name]
    if field.default is None or type(None) in typing.get_args(field.type):
        assert getattr(group(**{name: None}), name) is None
    else:
        with pytest.raises((TypeError, ValueError), match=f"^`{name}` must "):
            group(**{name: None})


def test_a_group_resolves_its_names():
    """Names become the objects that the trainer works with."""
    precision = PrecisionConfig("mixed_float16", 1024)

    assert precision.resolved == scaling.Precision("mixed_float16")
    assert precision.rule == scaling.FixedLossScale(1024)
    assert PrecisionConfig("mixed_float16").rule == scaling.DynamicLossScale()
    assert UpdateConfig(clipnorm=2.0).clip == Clip(clipnorm=2.0)
    assert RunConfig().folder is None
    assert RunConfig("runs/a").folder == pathlib.Path.cwd() / "runs" / "a"
    assert RunConfig(strategy="one_device").resolved_strategy.num_replicas_in_sync == 1


@pytest.mark.parametrize("name", ["profile_steps", "divergence"])
def test_settings_that_need_a_folder_are_checked_with_it(name):
    """`check_model_dir` refuses a profile or a divergence without `model_dir`."""
    value = {"profile_steps": (2, 3), "divergence": groups.Divergence(loss_above=1.0)}[name]
    config = MonitorConfig(**{name: value})

    config.check_model_dir("runs/a")
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must be None without `model_dir`")):
        config.check_model_dir(None)

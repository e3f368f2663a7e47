"""A schedule on the command line is text that makes one of the package's schedules, and runs no code."""

from __future__ import annotations

import pytest

import jaxpp_async as jpp
from jaxpp_async.commands.output import UseError
from jaxpp_async.commands.schedule_text import parse_schedule


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("Std1F1B(4)", jpp.Std1F1B(4)),
        (" GPipe(num_stages = 2, stages=[3]) ", jpp.GPipe(2, stages=[3])),
        ('Std1F1B(4, stages="balanced")', jpp.Std1F1B(4, stages="balanced")),
        ("ControllableMemory(4, activations=2.5)", jpp.ControllableMemory(4, activations=2.5)),
    ],
)
def test_the_text_is_the_call_that_makes_it(text, schedule):
    assert parse_schedule(text) == schedule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no schedule; write one such as 'Std1F1B"),
        ("Std1F1B(4", "is no schedule"),
        ("Std1F1B", r"lacks its number of stages; write Std1F1B\(4\)"),
        ("jpp.Std1F1B(4)", "is no schedule"),
        ("Std1f1b(4)", "there is no schedule 'Std1f1b'; did you mean Std1F1B?"),
        ("print(4)", "there is no schedule 'print'; there are Auto, ControllableMemory, "),
        ("schedule_from_csv('x')", "there is no schedule 'schedule_from_csv'"),
        ("Std1F1B(open('x'))", "its arguments have to be numbers, texts or lists of them"),
        ("Std1F1B(*[4])", "its arguments have to be numbers"),
        ("Std1F1B(**{'num_stages': 4})", "missing a required argument"),
        ("Std1F1B(0)", "num_stages"),
        ("Std1F1B(4, 5, 6)", "too many positional arguments"),
        ("Std1F1B(4, colour='red')", "unexpected keyword argument 'colour'"),
    ],
)
def test_other_text_is_refused(text, says):
    with pytest.raises(UseError, match=says):
        parse_schedule(text)

"""Direct tests of values that are made by the ten thousand."""

from __future__ import annotations

import pytest

from jaxpp_async.base.frozen import cached_value, frozen


@frozen()
class Point:
    x: int
    y: int = 0


@frozen(eq=False)
class Node:
    x: int


def test_values_with_equal_fields_are_one_key():
    assert Point(1) == Point(1, 0) != Point(2)
    assert {Point(1): "a"}[Point(1)] == "a"


def test_without_equality_a_value_equals_itself_alone():
    one, other = Node(1), Node(1)
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_there_is_no_place_for_other_attributes():
    with pytest.raises(AttributeError):
        Point(1).z = 3


class Circle:
    def __init__(self):
        self.computed = 0

    @cached_value
    def area(self) -> int:
        """Its area."""
        self.computed += 1
        return 42


def test_a_kept_property_is_computed_when_first_asked_for_and_then_never_again():
    circle = Circle()
    assert circle.computed == 0
    assert (circle.area, circle.area, circle.computed) == (42, 42, 1)
    assert Circle().computed == 0


def test_of_the_class_a_kept_property_is_itself_with_its_words():
    assert isinstance(Circle.area, cached_value)
    assert Circle.area.__doc__ == "Its area."

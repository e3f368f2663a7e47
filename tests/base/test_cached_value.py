"""Direct tests of properties that are computed once."""

from __future__ import annotations

from jaxpp_async.base.cached_value import cached_value


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

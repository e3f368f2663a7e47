"""Direct tests of the parts of a leaf that stacks layers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpp_async.program.leaf_parts import Parts, leaf_names, part_positions

ROWS, COLUMNS = Parts(0, (0, 2, 5)), Parts(1, (0, 1, 3))


@pytest.mark.parametrize(("parts", "shape"), [(ROWS, (5, 3)), (COLUMNS, (5, 3)), (COLUMNS, (2, 3, 4))])
def test_parts_together_are_the_array(parts, shape):
    whole = np.arange(np.prod(shape)).reshape(shape)
    cut = [whole[index] for index in parts.slices]
    assert tuple(part.shape for part in cut) == parts.shapes(shape)
    assert [parts.whole_shape(part.shape) for part in cut] == [shape] * parts.count
    assert [whole[start] for start in parts.starts(len(shape))] == [part[(0,) * len(shape)] for part in cut]
    np.testing.assert_array_equal(np.concatenate(cut, parts.axis), whole)


def test_a_part_is_named_by_its_rows():
    assert ROWS.names("p['w']") == ("p['w'][0:2]", "p['w'][2:5]")
    assert COLUMNS.names("x") == ("x[:, 0:1]", "x[:, 1:3]")


def test_each_leaf_is_found_among_all_parts_with_its_own_name():
    leaves = (None, ROWS, None)
    assert part_positions(leaves) == (range(1), range(1, 3), range(3, 4))
    assert leaf_names(("a", *ROWS.names("w[0]"), "b"), leaves) == ("a", "w[0]", "b")


def test_neighbours_of_one_key_are_joined():
    rows = Parts(1, (0, 1, 2, 5, 6))
    assert rows.joined("aabb") == Parts(1, (0, 2, 6))
    assert rows.joined("abba") == Parts(1, (0, 1, 5, 6))
    assert rows.joined("aaaa") == Parts(1, (0, 6))
    assert Parts(0, (0, 3)).joined("a") == Parts(0, (0, 3))

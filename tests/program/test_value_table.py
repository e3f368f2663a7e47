"""Values by column are the values that they stand for."""

import pytest
from graph_builder import F4, pipeline_graph
from msgspec import structs

from jaxpp_async.compiler.lowering import lower
from jaxpp_async.compiler.verify import verify_graph
from jaxpp_async.program.instructions import Aval, Delete, Output, Send, Value, ValueTable, avals_of, kinds_of

VALUES = (Value(F4, "x", "input"), Value(Aval((2,), "int32"), "y"), Value(F4, "z", "accumulator"))


def table(values=VALUES) -> ValueTable:
    labels = [v.label for v in values]
    return ValueTable(avals_of(values), kinds_of(values), labels.__getitem__)


def test_a_table_is_the_sequence_of_its_values():
    assert tuple(table()) == VALUES and len(table()) == 3
    assert [table()[i] for i in (0, 2, -1)] == [VALUES[0], VALUES[2], VALUES[2]]
    assert table()[1:] == VALUES[1:] and table() == table()
    with pytest.raises(IndexError):
        table()[3]


def test_other_types_leave_labels_and_kinds():
    other = Aval((7,), "float32")
    assert list(table().with_avals([other] * 3)) == [structs.replace(v, aval=other) for v in VALUES]


def test_a_graph_of_columns_lowers_to_the_same_programs():
    graph = pipeline_graph(3, 4)
    columns = structs.replace(graph, values=table(graph.values))
    verify_graph(columns)
    assert lower(columns) == lower(graph)


def test_frozen_values_compare_by_type_and_fields():
    assert Send(1, 2, 3) == Send(1, 2, 3) and hash(Send(1, 2, 3)) == hash(Send(1, 2, 3))
    assert Delete(1) != Output(1, 0) and Send(1, 2, 3) != Send(1, 2, 4)
    with pytest.raises(AttributeError):
        Delete(1).buffer = 2  # pyright: ignore

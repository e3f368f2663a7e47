"""Programs travel as messages, and print as text that tells all of them, whatever they hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError, msgpack
from program_text import parse_aval, parse_program

from jaxpp_async.program.actor_program import (
    ActorProgram,
    format_aval,
    format_instruction,
    format_instructions,
    format_program,
)
from jaxpp_async.program.instructions import Aval, Delete, Input, Output, Recv, Run, Send

F32 = Aval((8, 16), "float32", ("data", None))
SCALAR = Aval((), "float32")

GOLDEN = """\
actor 1: 6 slots
uncounted b0-b1 b4
slot   b5 bf16[3]
input  b0 = arg 3 f32[8,16]{data,} donated
input  b1 = arg 4 f32[]
recv   b2 from 0 tag 7 f32[8,16]{data,}
run    "fwd(stage 1, mb 3)" exe 2 (b0, b2) -> (b3 f32[8,16]{data,}, b4 f32[]) donate (0)
send   b3 to 2 tag 8
delete b3
output b4 = result 0
"""


def golden_program() -> ActorProgram:
    return ActorProgram(
        1,
        (
            Input(0, 3, True),
            Input(1, 4),
            Recv(2, 0, 7),
            Run("fwd(stage 1, mb 3)", 2, (0, 2), (3, 4), (0,)),
            Send(3, 2, 8),
            Delete(3),
            Output(4, 0),
        ),
        (F32, SCALAR, F32, F32, SCALAR, Aval((3,), "bfloat16")),
        frozenset({0, 1, 4}),
    )


def test_a_program_reads_like_a_listing():
    assert str(golden_program()) == GOLDEN
    assert parse_program(GOLDEN) == golden_program()
    assert format_instructions(golden_program()) == GOLDEN.splitlines()[3:]


def test_one_instruction_alone_leaves_out_the_avals_of_results():
    program = golden_program()
    assert (
        format_instruction(program, 3) == 'run    "fwd(stage 1, mb 3)" exe 2 (b0, b2) -> (b3, b4) donate (0)'
    )
    assert format_instruction(program, 2) == "recv   b2 from 0 tag 7 f32[8,16]{data,}"


def test_an_instruction_on_a_slot_that_does_not_exist_has_a_text():
    program = ActorProgram(0, (Recv(6, -1, 2), Input(-1, 0), Run("f", 0, (), (6,))), ())
    found = [format_instruction(program, index) for index in range(3)]
    assert found == ["recv   b6 from -1 tag 2", "input  b-1 = arg 0", 'run    "f" exe 0 () -> (b6)']


@pytest.mark.parametrize(
    "aval, text",
    [
        (Aval((), "bool"), "bool[]"),
        (Aval((0, 3), "int4"), "int4[0,3]"),
        (Aval((2,), "float8_e4m3fn", ()), "float8_e4m3fn[2]"),
        (Aval((2,), "uint32", (None,)), "u32[2]{}"),
        (Aval((2, 2), "int64", (None, "data")), "i64[2,2]{,data}"),
        (
            Aval((2, 2, 2), "float32", (("data", "model"), ("data",), ())),
            "f32[2,2,2]{(data+model),(data),()}",
        ),
        (Aval((2,), "float32", ('a "b", {c}+(d)',)), 'f32[2]{"a \\"b\\", {c}+(d)"}'),
    ],
)
def test_avals(aval, text):
    assert format_aval(aval) == text
    assert parse_aval(text) == aval


@pytest.mark.parametrize("dtype", ["f32", "key<fry>", ""])
def test_a_dtype_that_is_none_is_refused(dtype):
    with pytest.raises(ValueError, match="not the name of a dtype"):
        format_aval(Aval((), dtype))


# ---------------------------------------------------------------- every program

small = st.integers(0, 9)
labels = st.text(max_size=8)
axes = st.one_of(st.sampled_from(["data", "model"]), st.text(max_size=4))
avals = st.builds(
    Aval,
    st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "uint8", "bool", "complex64", "float8_e5m2", "int4"]),
    st.lists(st.one_of(st.none(), axes, st.lists(axes, max_size=2).map(tuple)), max_size=3).map(tuple),
)
slots = st.lists(small, max_size=4).map(tuple)
instructions = st.one_of(
    st.builds(Input, small, small, st.booleans()),
    st.builds(Run, labels, small, slots, slots, slots),
    st.builds(Send, small, st.integers(-1, 9), st.integers(0, 1 << 24)),
    st.builds(Recv, small, st.integers(-1, 9), small),
    st.builds(Delete, small),
    st.builds(Output, small, small),
)
programs = st.builds(
    ActorProgram,
    st.integers(-1, 99),
    st.lists(instructions, max_size=12).map(tuple),
    st.lists(avals, max_size=6).map(tuple),
    st.frozensets(st.integers(0, 20)),
)


@settings(max_examples=300, deadline=None)
@given(programs)
def test_every_program_survives_the_round_trip(program):
    text = format_program(program)
    assert text.isascii()
    assert parse_program(text) == program


@settings(max_examples=300, deadline=None)
@given(programs)
def test_every_program_travels_as_a_message(program):
    assert msgpack.decode(msgpack.encode(program), type=ActorProgram) == program


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        (["call", 1], "Invalid value 'call'"),
        ([1], "Expected `str`, got `int`"),
        (["delete"], "Expected `array` of at least length 2, got 1"),
        (["delete", 1, 2], "Expected `array` of at most length 1, got 2"),
        (["delete", True], "Expected `int`, got `bool`"),
        (["run", "f", 0, [0], ["1"], []], "Expected `int`, got `str`"),
    ],
)
def test_what_is_no_instruction_is_refused_with_its_position(instruction, says):
    encoded = msgpack.encode([0, [["delete", 0], instruction], [], []])
    with pytest.raises(ValidationError) as caught:
        msgpack.decode(encoded, type=ActorProgram)
    assert says in str(caught.value) and "`$[1][1]" in str(caught.value)

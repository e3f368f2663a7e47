"""Programs print as text and parse back, whatever they hold."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_async.errors import ProtocolError
from jaxpp_async.program.actor_program import (
    ActorProgram,
    format_aval,
    format_instruction,
    format_program,
    parse_aval,
    parse_program,
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
            Input(0, 3, F32, True),
            Input(1, 4, SCALAR),
            Recv(2, 0, 7, F32),
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
    assert parse_program("# a comment\n\n" + GOLDEN) == golden_program()


def test_one_instruction_alone():
    assert format_instruction(Run("f", 0, (1,), (2,))) == 'run    "f" exe 0 (b1) -> (b2)'
    assert format_instruction(Recv(1, -1, 2, SCALAR)) == "recv   b1 from -1 tag 2 f32[]"


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
    st.builds(Input, small, small, avals, st.booleans()),
    st.builds(Run, labels, small, slots, slots, slots),
    st.builds(Send, small, st.integers(-1, 9), st.integers(0, 1 << 24)),
    st.builds(Recv, small, st.integers(-1, 9), small, avals),
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


# ---------------------------------------------------------------- bad text


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("actor 1: 6 slots", "program 1", "line 1: a program begins with"),
        ("run  ", "call ", "line 7: unknown instruction 'call'"),
        ("tag 7", "tag seven", "line 6: malformed 'recv'"),
        ("tag 7", "tag " + "7" * 5000, "line 6: malformed 'recv'"),
        ("f32[8,16]{data,} donated", "f32[8,]{data,} donated", "line 4: bad aval"),
        ("{data,} donated", "{data+,} donated", "line 4: bad sharding"),
        ('mb 3)"', "mb 3)", "line 7: malformed 'run'"),
        ("fwd", "\\q", "line 7: Invalid"),
        ("slot   b5", "slot   b6", "line 3: slot b6, but the program has 6 slots"),
        ("slot   b5 bf16[3]\n", "", "nothing tells the aval of slot b5"),
        ("6 slots", "999999999999 slots", "nothing tells the aval of slot b6"),
        ("b0-b1 b4", "b0-b99999999999", "line 2: too many slots"),
        ("b0-b1 b4", "b0-", "line 2: bad slots"),
        ("delete b3", "delete b3 now", "line 9: malformed 'delete'"),
        ("tag 8", "tag \u0668", "line 8: malformed 'send'"),
    ],
)
def test_bad_text_is_refused_with_its_line(old, new, message):
    assert old in GOLDEN
    with pytest.raises(ProtocolError) as caught:
        parse_program(GOLDEN.replace(old, new, 1))
    assert message in str(caught.value)


def test_empty_text_is_refused():
    with pytest.raises(ProtocolError, match="begins with 'actor A: N slots'"):
        parse_program("")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.characters(max_codepoint=0x3FF))
def test_a_changed_character_parses_or_is_refused(position, character):
    with contextlib.suppress(ProtocolError):
        parse_program(GOLDEN[:position] + character + GOLDEN[position + 1 :])


def test_parsing_is_fast():
    run = [Run(f"bwd(stage 3, mb {i})", 5, tuple(range(8)), (2 * i, 2 * i + 1), (1,)) for i in range(1000)]
    rest = [(Send(2 * i, 1, i), Recv(2 * i + 1, 1, i, F32), Delete(2 * i), Output(3, i)) for i in range(1000)]
    program = ActorProgram(
        0, tuple(x for r, more in zip(run, rest, strict=True) for x in (r, *more)), (F32,) * 2000
    )
    text = format_program(program)
    best = min(_seconds(parse_program, text) for _ in range(3))
    # 30 ms where it was written; the bound allows for a loaded machine.
    assert best < 0.3, f"{best:.3f} s for {text.count(chr(10))} lines"


def _seconds(fn, *args) -> float:
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start

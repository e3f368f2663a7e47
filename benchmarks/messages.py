"""messages: what it takes to encode and decode the messages that carry a step and a program.

    python benchmarks/messages.py

A `Step` of 40 arguments and 40 results, its reply with the stamps of 200 instructions, and the `Load` of a
program of 8,800 instructions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from timeit import repeat
from typing import Any

from jaxpp_async.program.actor_program import ActorProgram
from jaxpp_async.program.instructions import Aval, Delete, Instruction, Recv, Run, Send
from jaxpp_async.protocol import codec
from jaxpp_async.protocol import messages as m

MICROBATCHES = 2200
SHAPE = Aval((8, 16), "float32", ("data",))


def program() -> ActorProgram:
    """A stage in the middle: of each microbatch a value comes, is computed with, goes on, and is deleted."""
    instructions: list[Instruction] = []
    for i in range(MICROBATCHES):
        run = Run(f"fwd(stage 1, mb {i})", 0, (2 * i,), (2 * i + 1,), donated=(0,))
        instructions += [Recv(2 * i, 0, i), run, Send(2 * i + 1, 2, MICROBATCHES + i), Delete(2 * i + 1)]
    return ActorProgram(1, tuple(instructions), (SHAPE,) * (2 * MICROBATCHES))


MESSAGES: dict[str, m.Message] = {
    "step": m.Step(
        0, 7, 1, dict(zip(range(40), range(1000, 1040), strict=True)), {k: 2000 + k for k in range(40)}
    ),
    "step_done": m.StepDone(7, m.StepStats(0.1, 0.2, 0.3, 4096, 80, b"\0" * 16 * 200)),
    "load": m.Load(1, program(), {0: "0" * 32}, {}),
}


def run() -> dict[str, dict[str, Any]]:
    """The figures of `make bench`: us to encode and to decode each message, and its bytes."""
    encoder, found = codec.Encoder(1 << 30), {}
    for name, message in MESSAGES.items():
        data = encoder.encode(message, 3)
        decoder = codec.decoder_of((type(message),))
        assert decoder.decode(data) == (3, message)
        found[name] = {
            "encode_us": best_us(lambda message=message: encoder.encode(message, 3)),
            "decode_us": best_us(lambda decoder=decoder, data=data: decoder.decode(data)),
            "bytes": len(data),
        }
    return found


def best_us(call: Callable[[], object]) -> float:
    """Return the time of one call, in us: of five series, which last some 0.1 s each, the quickest."""
    once_s = max(1e-7, min(repeat(call, number=3, repeat=3)) / 3)
    number = max(1, int(0.1 / once_s))
    return min(repeat(call, number=number, repeat=5)) / number * 1e6


if __name__ == "__main__":
    print(json.dumps({"messages": run()}))

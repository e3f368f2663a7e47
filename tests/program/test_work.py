"""The work of an executable is a plain value: it travels, and equal works are equal."""

import msgspec

from jaxpp_async.program.work import Collective, TaskWork


def test_a_work_survives_encoding():
    work = TaskWork("fwd", 2.0e9, 1.5e6, (Collective("all-reduce", (("data", 2), ("model", 4)), 4096.0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=TaskWork) == work
    assert hash(work) == hash(msgspec.structs.replace(work))

"""Direct tests of the errors that a user reads, from what is known of a failure."""

from __future__ import annotations

import signal

import pytest

from jaxpp_async.controller.error_messages import (
    abandoned,
    describe_end,
    describe_tail,
    died_error,
    follows_first_process,
    is_consequence,
    launch_error,
    lost_error,
    remote_error,
    silent_error,
    stuck_error,
)
from jaxpp_async.controller.stall_detector import ActorWait, StallDiagnosis
from jaxpp_async.errors import (
    ActorUnresponsiveError,
    MeshClosedError,
    ProtocolError,
    RemoteError,
    StepAbortedError,
    TransferError,
)
from jaxpp_async.launch.process_supervisor import Death
from jaxpp_async.protocol.actor_info import ActorInfo, ExitCode, ProcessRank
from jaxpp_async.protocol.messages import Failed, OpenTransfer, step_id

ACTOR = ActorInfo(1, "n1", 42, (), "ready")
WHO = "actor 1 (host n1, pid 42)"
STEP = step_id(7)
RUN = '#4 run    "fwd(stage 1, mb 3)" exe 2 (b0) -> (b1 f32[4])'


def place(error) -> tuple:
    return error.actor, error.host, error.pid, error.step, error.instruction


# ---------------------------------------------------------------- what stands behind a failure


@pytest.mark.parametrize(
    ("kind", "message", "of_several", "found"),
    [
        ("jaxpp_async.errors.TransferError", "", False, True),
        ("asyncio.exceptions.CancelledError", "", False, True),
        ("ValueError", "bad", True, False),
        ("jax.errors.JaxRuntimeError", "", False, False),
        ("jax.errors.JaxRuntimeError", "", True, True),
        ("ValueError", "Gloo: connection reset", True, True),
        ("ValueError", "Gloo: connection reset", False, False),
    ],
)
def test_some_failures_follow_from_another_one(kind, message, of_several, found):
    assert is_consequence(Failed(kind, message, ""), of_several=of_several) is found


@pytest.mark.parametrize(
    ("rank", "returncode", "found"),
    [(1, -signal.SIGABRT, True), (0, -signal.SIGABRT, False), (1, -signal.SIGKILL, False), (1, 1, False)],
)
def test_a_process_that_jax_aborted_is_the_echo_of_its_actors_first(rank, returncode, found):
    assert (
        follows_first_process(ActorInfo(1, "n1", 42, (), "failed", rank=rank, size=2), Death(returncode, ()))
        is found
    )


# ---------------------------------------------------------------- requests that failed


def test_an_error_on_an_actor_names_actor_step_task_and_cause_in_its_first_line():
    error = remote_error(ACTOR, Failed("ValueError", "no", "Traceback ...\n\n", STEP, RUN))
    first, at, *rest = str(error).split("\n")
    assert first == f"{WHO}, step 7, fwd(stage 1, mb 3): ValueError: no"
    assert at == f"  at {RUN}"
    assert rest == ["", "Traceback on the actor:", "Traceback ..."]
    assert type(error) is RemoteError
    assert place(error) == (1, "n1", 42, 7, RUN)
    assert (error.exception_type, error.remote_traceback) == ("ValueError", "Traceback ...\n\n")


def test_an_error_outside_of_a_step_names_the_actor_alone():
    error = remote_error(ACTOR, Failed("ValueError", "no", ""))
    assert str(error) == f"{WHO}: ValueError: no"
    assert error.step is None


@pytest.mark.parametrize(
    ("kind", "step", "ends_mesh", "cls"),
    [
        ("jaxpp_async.errors.TransferError", STEP, False, TransferError),
        ("jaxpp_async.errors.ProtocolError", STEP, False, ProtocolError),
        ("jaxpp_async.errors.TransferError", None, False, RemoteError),
        ("jaxpp_async.errors.TransferError", None, True, TransferError),
        ("jaxpp_async.errors.ProtocolError", None, True, RemoteError),
        ("other.TransferError", STEP, False, RemoteError),
    ],
)
def test_what_is_nobodys_code_fails_a_step_with_an_error_of_its_own_class(kind, step, ends_mesh, cls):
    assert type(remote_error(ACTOR, Failed(kind, "x", "", step), ends_mesh=ends_mesh)) is cls


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: Out of memory", "std::bad_alloc"])
def test_too_little_memory_is_told_with_where_to_read_what_is_needed(message):
    text = str(remote_error(ACTOR, Failed("XlaRuntimeError", message, "")))
    assert text.split("\n")[1].startswith("  the actor ran out of memory; `(await step.compile")


# ---------------------------------------------------------------- actors that are gone


@pytest.mark.parametrize(
    ("returncode", "tail", "text"),
    [
        (-9, (), "was killed by SIGKILL (possibly out of memory)"),
        (-11, (), "was killed by SIGSEGV"),
        (-11, ("MemoryError",), "was killed by SIGSEGV (possibly out of memory)"),
        (-250, (), "was killed by signal 250"),
        (3, (), "exited with code 3"),
        (3, ("x: cannot allocate memory",), "exited with code 3 (possibly out of memory)"),
        (ExitCode.CRASH, (), "exited with code 1 (it raised outside any request)"),
    ],
)
def test_the_end_of_a_process_reads_as_its_signal_or_its_code(returncode, tail, text):
    assert describe_end(returncode, tail) == text


def test_every_code_but_success_has_a_reason_of_its_own():
    reasons = {describe_end(code).partition(" (")[2] for code in set(ExitCode) - {ExitCode.OK}}
    assert "" not in reasons and len(reasons) == len(ExitCode) - 1
    assert describe_end(ExitCode.OK) == "exited with code 0"


def test_a_death_is_told_with_the_task_the_exception_and_the_last_lines():
    error = died_error(ACTOR, Death(3, ("hello", "ValueError: no", "bye")), STEP, RUN)
    assert str(error).split("\n") == [
        f"{WHO} exited with code 3 during step 7, at fwd(stage 1, mb 3): ValueError: no",
        "The end of its output:",
        "  hello",
        "  ValueError: no",
        "  bye",
    ]
    assert place(error) == (1, "n1", 42, 7, RUN)
    assert describe_tail(()) == ""


def test_an_actor_that_closes_its_connection_and_one_that_is_silent_say_so():
    lost = lost_error(ACTOR, ProtocolError("bad MAC"), (), STEP)
    assert str(lost) == f"{WHO} closed its control connection though its process still runs: bad MAC"
    silent = silent_error(ACTOR, 10.25, None, "run f of step 7")
    assert str(silent).startswith(f"{WHO} has not been heard of for 10.2 s; it was last at run f of step 7; ")
    assert (lost.step, silent.step, silent.instruction) == (7, None, "run f of step 7")


def test_an_actor_that_did_not_come_up_is_named_by_its_actor_and_its_rank():
    error = launch_error(ProcessRank(3, 2), "did not start", ("OSError: no such file",))
    assert str(error).startswith(
        "actor 1 (process 1 of 2) did not start: OSError: no such file\nThe end of its output:"
    )
    assert error.actor == 1


# ---------------------------------------------------------------- steps that do not go on


@pytest.mark.parametrize(("is_lost", "cls"), [(True, TransferError), (False, ActorUnresponsiveError)])
def test_a_step_that_does_not_go_on_is_told_with_its_autopsy(is_lost, cls):
    wait = ActorWait(1, STEP, OpenTransfer("receive", 0, 0, 3, 16, posted=True, needed=True))
    diagnosis = StallDiagnosis(
        STEP,
        "lost",
        "b0 is lost",
        1,
        "recv b0",
        wait if is_lost else None,
        (1,),
        ("actor 1 waits",),
        {1: "here"},
    )
    error = stuck_error(diagnosis, 5.0, {1: ACTOR})
    assert type(error) is cls
    assert str(error).split("\n") == [
        "step 7 has not gone on for 5.0 s: b0 is lost",
        "Who waits for whom:",
        "  actor 1 waits",
        "Where each actor is:",
        f"  {WHO}: here",
    ]
    assert place(error) == (1, "n1", 42, 7, "recv b0")


def test_an_error_that_follows_from_another_has_it_as_its_cause():
    cause = TransferError("lost", actor=1)
    error = abandoned(cause, "closed", MeshClosedError, step=3)
    assert (type(error), str(error), error.__cause__, error.step) == (MeshClosedError, "closed", cause, 3)
    assert isinstance(abandoned(cause, "", StepAbortedError), StepAbortedError)

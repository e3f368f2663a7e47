"""device_step_run: a step on devices that compute after a call has returned (`Machine.device`).

A run is over for the executor when the device says so. With that, what holds on CPUs holds there: sends start when the
value is there, and memory is freed, or written again, when nothing on the device reads it any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import jax

from jaxpp_async.actors.devices.device_work import DeviceWork, Then
from jaxpp_async.actors.plan import BufferKey, Execute, PostRecv, StartSend
from jaxpp_async.actors.steps.step_run import StepRun, nothing_left
from jaxpp_async.actors.store import Entry
from jaxpp_async.actors.values.receive_pool import ReceiveBuffer
from jaxpp_async.actors.values.shards import Layout, device_memories, duplicate, is_ready
from jaxpp_async.transport.buffers import Memory


class DeviceStepRun(StepRun):
    """As `StepRun`, where `machine.device` tells of the end of work."""

    _run_ended_s = 0.0  # the last one

    @cached_property
    def _device(self) -> DeviceWork:
        device = self._machine.device
        assert device is not None  # else `StepRun` would have been chosen
        return device

    @cached_property
    def _unready(self) -> set[BufferKey]:
        """Arguments that the device may still be filling."""
        return set()

    def _has_bound(self, keys: Iterable[BufferKey]) -> None:
        self._unready.update(keys)

    def _compute(self, command: Execute) -> Callable[[], None] | None:
        """Runs on the compute thread: gives a run to the device, and does not wait for it."""
        if self.ended or not self._may_begin():
            return nothing_left
        self._note(command.instruction, computing=True)
        called_s = time.monotonic()
        try:
            outputs = self._run(command, wait=False)
            self._device.after_run(outputs, partial(self._ran_on_device, command, called_s))
        except Exception as error:  # as in `StepRun._compute`
            return partial(self.fail, error, command.instruction)
        return None

    def _ran_on_device(self, command: Execute, called_s: float, end_s: float, error: Exception | None) -> None:
        self._on_thread -= 1
        if self.ended:
            return
        if error is not None:
            self.fail(error, command.instruction)
            return
        if not self._on_thread:
            self._note(command.instruction)
        # It may have been called while the one before it still ran.
        start_s, self._run_ended_s = max(called_s, self._run_ended_s), end_s
        self._obey(self._ran(command, start_s, end_s))

    def _received(self, command: PostRecv, buffer: ReceiveBuffer) -> None:
        """The data is in, on the first device that is to have it."""
        if not buffer.replicas:
            self._take_in(command, buffer)
            return

        try:
            self._device.spread(buffer.replicas, self._if_well(command, partial(self._take_in, command, buffer)))
        except Exception as error:  # the device refused the copy: the step's failure, never the transport's
            self.fail(error, command.instruction)

    def _take_in(self, command: PostRecv, buffer: ReceiveBuffer) -> None:
        """The data is in on every device."""
        if command.private:
            self._machine.compute.submit(partial(self._copy_out, command, buffer))
            return
        self._arrays[command.buffer] = buffer.array
        self._obey(self.executor.arrived(command.buffer))

    def _copy_out(self, command: PostRecv, buffer: ReceiveBuffer) -> Callable[[], None] | None:
        """Runs on the compute thread: an array of its own for what is to outlive the receive buffer."""
        assert buffer.array is not None

        def take_copy() -> None:
            self._receiving.pop(command.buffer).give_back()
            self._arrays[command.buffer] = copy
            self._obey(self.executor.arrived(command.buffer))

        try:
            copy = duplicate(buffer.array)
            self._device.after_copy((copy,), self._if_well(command, take_copy))
        except Exception as error:  # there is no room for it, for one: the step's failure
            return partial(self.fail, error, command.instruction)
        return None

    def _memories(self, command: StartSend, array: jax.Array, layout: Layout) -> Sequence[Memory] | None:
        if command.buffer in self._unready and not is_ready(array):
            self._machine.compute.submit(partial(self._wait_to_send, command, array))
            return None
        return device_memories(array, layout)

    def _wait_to_send(self, command: StartSend, array: jax.Array) -> Callable[[], None] | None:
        """Runs on the compute thread: an argument that was given to the device and may not be there yet."""

        def send() -> None:
            self._unready.discard(command.buffer)
            self._obey([command])

        try:
            self._device.after_copy((array,), self._if_well(command, send))
        except Exception as error:  # the array failed
            return partial(self.fail, error, command.instruction)
        return None

    def _if_well(self, command: PostRecv | StartSend, go_on: Callable[[], None]) -> Then:
        """What the device is to call at the end of its part in a transfer, on the event loop."""

        def ended(_: float, error: Exception | None) -> None:
            if self.ended:
                return
            if error is None:
                go_on()
            else:
                self.fail(error, command.instruction)

        return ended

    def _wait_copied(self, copy: jax.Array, entry: Entry) -> Callable[[], None] | None:
        try:
            self._device.after_copy((copy,), lambda _, error: self._copied(entry, error or copy))
        except Exception as error:  # as in `StepRun._wait_copied`
            return partial(self._copied, entry, error)
        return None

"""Run one step of a loaded program on devices that compute after a call has returned, such as GPUs.

A task counts as finished only when the device reports that it has computed the results. Sends therefore start
only when the value is available, and memory is freed or overwritten only when no work on the device reads it
any more, as on CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import jax

from jaxpp_async.actors.array_store import StoredArray
from jaxpp_async.actors.cuda import DeviceWork, OnReached
from jaxpp_async.actors.execution_plan import BufferKey, Execute, PostRecv, StartSend
from jaxpp_async.actors.receive_buffers import ReceiveBuffer
from jaxpp_async.actors.shards import Layout, device_memories, duplicate, is_ready
from jaxpp_async.actors.step_run import StepRun
from jaxpp_async.transport.base import Memory


class DeviceStepRun(StepRun):
    """One step under way, on devices that compute after a call has returned and report the end of their work
    later."""

    _run_ended_s = 0.0  # the time at which the last executable ended

    @cached_property
    def _device_work(self) -> DeviceWork:
        device_work = self._resources.device_work
        assert device_work is not None  # otherwise the step would be a `StepRun`
        return device_work

    @cached_property
    def _unready(self) -> set[BufferKey]:
        """The keys of the buffers of step arguments that the device may still be computing."""
        return set()

    def _has_bound(self, keys: Iterable[BufferKey]) -> None:
        self._unready.update(keys)

    def _compute(self, command: Execute) -> Callable[[], None] | None:
        """Call an executable without waiting for its results, and have the device report when it has computed
        them.

        This is called on the compute thread.

        Returns:
            None if there was no error, or if the step has ended or must not begin more tasks. After an error:
            a function to call on the event loop, which fails the step.
        """
        if self.ended or not self._may_begin():
            return None
        self._note(command.instruction, computing=True)
        called_s = time.monotonic()
        try:
            outputs = self._run(command, wait=False)
            self._device_work.after_run(outputs, partial(self._ran_on_device, command, called_s))
        except Exception as error:  # as in `StepRun._compute`
            return partial(self.fail, error, command.instruction)
        return None

    def _ran_on_device(
        self, command: Execute, called_s: float, end_s: float, error: Exception | None
    ) -> None:
        self._on_thread -= 1
        if self.ended:
            return
        if error is not None:
            self.fail(error, command.instruction)
            return
        if not self._on_thread:
            self._note(command.instruction)
        # The executable may have been called while the one before it was still computing.
        start_s, self._run_ended_s = max(called_s, self._run_ended_s), end_s
        self._carry_out(self._ran(command, start_s, end_s))

    def _received(self, command: PostRecv, buffer: ReceiveBuffer) -> None:
        """Copy the received data of each part from the first device that stores it to the others, then make
        the array available.

        Args:
            command: the command that posted the receive.
            buffer: the memory with the data.
        """
        if not buffer.replicas:
            self._received_everywhere(command, buffer)
            return
        go_on = partial(self._received_everywhere, command, buffer)
        try:
            self._device_work.copy_between_devices(buffer.replicas, self._unless_failed(command, go_on))
        except Exception as error:  # the device refused the copy, which fails the step, not the transport
            self.fail(error, command.instruction)

    def _received_everywhere(self, command: PostRecv, buffer: ReceiveBuffer) -> None:
        """Make a received array available to the step once all devices have its data. If the array must be
        private, copy it first.

        Args:
            command: the command that posted the receive.
            buffer: the memory with the data.
        """
        if command.private:
            self._resources.compute.submit(partial(self._copy_out, command, buffer))
            return
        self._arrays[command.buffer] = buffer.array
        self._carry_out(self.executor.arrived(command.buffer))

    def _copy_out(self, command: PostRecv, buffer: ReceiveBuffer) -> Callable[[], None] | None:
        """Copy a received array that must outlive its receive buffer, and make the copy available to the
        step.

        This is called on the compute thread.

        Returns:
            None if there was no error; otherwise a function to call on the event loop, which fails the step.
        """
        assert buffer.array is not None

        def use_copy() -> None:
            self._receiving.pop(command.buffer).give_back()
            self._arrays[command.buffer] = copy
            self._carry_out(self.executor.arrived(command.buffer))

        try:
            copy = duplicate(buffer.array)
        except Exception as error:  # such as too little memory; this fails the step
            return partial(self.fail, error, command.instruction)
        return self._after_copy(copy, command, use_copy)

    def _memories(self, command: StartSend, array: jax.Array, layout: Layout) -> Sequence[Memory] | None:
        if command.buffer in self._unready and not is_ready(array):
            self._resources.compute.submit(partial(self._wait_to_send, command, array))
            return None
        return device_memories(array, layout)

    def _wait_to_send(self, command: StartSend, array: jax.Array) -> Callable[[], None] | None:
        """Have the device report when it has computed a step argument, and then send the argument.

        This is called on the compute thread.

        Returns:
            None if there was no error; otherwise a function to call on the event loop, which fails the step.
        """

        def send() -> None:
            self._unready.discard(command.buffer)
            self._carry_out([command])

        return self._after_copy(array, command, send)

    def _after_copy(
        self, array: jax.Array, command: PostRecv | StartSend, go_on: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Have `go_on` called on the event loop once the device has computed an array.

        Args:
            array: the array.
            command: the command for which the array is needed. An error is reported as an error of this
                command's instruction.
            go_on: the function to call once the array is computed.

        Returns:
            None if there was no error; otherwise a function to call on the event loop, which fails the step.
        """
        try:
            self._device_work.after_copy((array,), self._unless_failed(command, go_on))
        except Exception as error:  # the array failed
            return partial(self.fail, error, command.instruction)
        return None

    def _unless_failed(self, command: PostRecv | StartSend, go_on: Callable[[], None]) -> OnReached:
        """Return a callback for the device that calls `go_on`, or fails the step if the device has failed.

        Args:
            command: the command that waits for the device; after a failure, its instruction is reported as
                failed.
            go_on: the function to call if the device has not failed.
        """

        def on_reached(_: float, error: Exception | None) -> None:
            if self.ended:
                return
            if error is None:
                go_on()
            else:
                self.fail(error, command.instruction)

        return on_reached

    def _wait_copied(self, copy: jax.Array, entry: StoredArray) -> Callable[[], None] | None:
        try:
            self._device_work.after_copy((copy,), lambda _, error: self._copied(entry, error or copy))
        except Exception as error:  # as in `StepRun._wait_copied`
            return partial(self._copied, entry, error)
        return None

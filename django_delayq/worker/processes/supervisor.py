"""Starts worker processes, replaces those that die, and ends them in order. It runs no handler and waits for no log."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections as django_connections

from ...broker import publisher
from ...core import actors
from ...core.callables import nothing
from ...core.readable import wait_readable
from ...core.worker_options import Options
from ...project import registry
from ...record.sql import statements
from ...record.sql.sessions import name_sessions
from ..shared import connections
from ..shared.log_writer import FINISH_TIME, log_writer, print_error
from ..shared.shared_state import ProcessLock, SharedState
from ..upkeep.heartbeat import HeartbeatFile
from . import output, plain_signals
from .children import Child, Children
from .process import WorkerProcess, collect_less_often
from .process_tuning import USUAL, ProcessTuning
from .releases import Releases

logger = logging.getLogger("django_delayq")


def _warn_of_threads() -> None:
    """Log the names of threads that the worker processes will lack: only the thread that forks goes on in a child."""
    kept = (threading.current_thread(), log_writer.thread)
    lost = [thread.name for thread in threading.enumerate() if thread not in kept]
    if lost:
        logger.warning(
            "These threads were started while the project was loaded, and do not run in the worker processes: %s. "
            "Unless a library starts them again after a fork, start them in a function with @worker_started",
            ", ".join(lost),
        )


class Supervisor:
    """The parent process of ``run_delayq``. Signal handlers only count signals and pass them on."""

    def __init__(self, options: Options, tuning: ProcessTuning = USUAL) -> None:
        self.options = options
        self.tuning = tuning
        self.heartbeat_file = HeartbeatFile(options.heartbeat_file) if options.heartbeat_file else None
        # The process that holds this lock may isolate a message.
        self.isolation_lock = ProcessLock()
        self.releases = Releases(options, self._fork_to, tuning)
        self.children = Children(options, self._fork, self.releases.add, tuning)
        self._signals = 0
        self._pid = os.getpid()
        self._wake_read, self._wake_write = os.pipe()
        # A pipe that children see closed when the parent is gone.
        self._alive_read, self._alive_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)

    def run(self) -> int:
        """Supervise until a signal or a limit ends the work. Return the exit code for the shell."""
        # The children share the memory of what is loaded now; their garbage collectors neither write to it nor search
        # it. These two import what each of them needs, and connect to nothing.
        statements(self.options.using)
        publisher.get(self.options.using)
        gc.freeze()
        _warn_of_threads()
        name_sessions(f"supervisor/{os.getpid()}")
        with self._handling_signals():
            self._loop()
            self._release_the_last()
        if self.releases.waiting:
            names = ", ".join(dead.name for dead in self.releases.waiting)
            logger.warning("Stopped; other workers release the claims of %s when their leases end", names)
        else:
            logger.info("Stopped: all worker processes have ended, and their claims are released")
        return 0

    def _loop(self) -> None:
        """Check the children until all have ended."""
        deadline: float | None = None
        children, checked = self.children, time.monotonic()
        while True:
            self.reap()
            self._act_on_signals()
            if children.are_done:
                return
            if children.is_stopping:
                # Children keep the graceful timeout themselves; this deadline is for one that hangs in its shutdown.
                deadline = deadline or time.monotonic() + 2 * self.options.graceful_timeout + 15
                if time.monotonic() > deadline:
                    children.kill()
            else:
                before, checked = checked, time.monotonic()
                children.check(checked - before)
                if self.heartbeat_file is not None and children.shows_life():
                    self.heartbeat_file.touch()
            self.releases.go_on()
            self._sleep(self.tuning.check_interval)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _fork(self) -> Child:
        """Start a worker process."""
        shared = SharedState(self.options.threads, self.options.async_concurrency, registry.largest_batch())
        run = actors.new_run()
        pid = self._fork_to(self.run_child, shared, run)
        name = actors.worker_name(self.options.name, pid, run)
        logger.debug("Started worker process %s", name)
        return Child(pid, name, time.monotonic(), shared)

    def _fork_to(self, work: Callable[..., int], *given: Any) -> int:
        """Start a process that calls ``work`` with the arguments and exits with the code it returns. Return its pid."""
        # The child must not share any connection that is open here.
        connections.close_all()
        django_connections.close_all()
        publisher.get.cache_clear()
        # Buffered output would be written by the child too.
        log_writer.submit(output.flush)
        pid = log_writer.fork()
        if pid == 0:
            code = 1
            try:
                self._leave_the_supervisor()
                code = work(*given)
            except BaseException:  # noqa: BLE001
                print_error()
            finally:
                log_writer.submit(output.flush)
                log_writer.stop(FINISH_TIME)
                os._exit(code)
        return pid

    def run_child(self, shared: SharedState, run: str) -> int:
        """Run a worker process, in the child. Return its exit code."""
        name = actors.worker_name(self.options.name, os.getpid(), run)
        process = WorkerProcess(self.options, self.isolation_lock, shared, name, self._wake)
        collect_less_often(self.tuning.young_objects)
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        if self._signals:
            # The signals came while the process was made.
            process.stop()
        plain_signals.switch(on=True)

        def watch() -> bool:
            if not process.recorder.hangs():
                shared.show_life(process.beat)
            return self._is_orphaned()

        code = process.run(watch)
        shared.ended = True
        return code

    def _leave_the_supervisor(self) -> None:
        """Take the signals and the end of the pipe that a child has, in the child."""
        signal.set_wakeup_fd(-1)
        # What a terminal sends reaches the whole group, and the parent decides. Ignored signals would stay so in the
        # programs that handlers start. SIGTERM is counted until there is a process to stop.
        for number in set(plain_signals.CAUGHT) - {signal.SIGTERM}:
            signal.signal(number, nothing)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._alive_write)

    def _is_orphaned(self) -> bool:
        """Return whether the supervisor is gone. Called in a child."""
        orphaned = bool(wait_readable([self._alive_read], 0))
        if orphaned:
            logger.error("The supervisor is gone; this process ends too")
        return orphaned

    def reap(self) -> None:
        """Handle the death of each child that has died."""
        # -1: as PID 1 of a container this process inherits orphans of handlers too.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.running.get(pid)
            if child is not None:
                self.children.note_death(child, os.waitstatus_to_exitcode(status))
            elif pid == self.releases.pid:
                self.releases.note_end(done=status == 0)

    def _release_the_last(self) -> None:
        """Have all claims released. Wait for this up to ``final_release`` seconds."""
        deadline = time.monotonic() + self.tuning.final_release
        while self.releases.waiting and (left := deadline - time.monotonic()) > 0:
            self.releases.go_on(final=True)
            self._sleep(min(left, self.tuning.check_interval))
            self.reap()
        self.releases.kill()

    # --- signals and waiting ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Count the signals that end a worker while the loop runs: the first ends in order, the second at once.

        Also as PID 1, which has no default handlers.
        """

        def count(*_: object) -> None:
            self._signals += 1
            # The loop may be waiting for the database: the children get the signal at once.
            if os.getpid() == self._pid:
                self.children.send(signal.SIGTERM)

        former = {number: signal.signal(number, count) for number in plain_signals.CAUGHT}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, nothing)
        former_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _act_on_signals(self) -> None:
        """End in order after the first signal, at once after the second."""
        if self._signals and not self.children.is_stopping:
            self.children.stop()
            logger.info("Stopping: running handlers have %g s to finish", self.options.graceful_timeout)
        if self._signals > 1:
            self.children.kill()

    def _wake(self) -> None:
        """Have the loop look at the children at once. Called in a child."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal comes or a child is to be started."""
        if until_start := self.children.seconds_to_start:
            seconds = min(seconds, until_start + 0.001)
        if self.releases.is_soon:
            seconds = min(seconds, self.tuning.together)
        wait_readable([self._wake_read], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

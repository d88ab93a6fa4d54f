"""Writes the log of a process in a thread of its own: what records, renews, claims or supervises waits for no log.

A handler of the log may block for long: a pipe that nobody reads, a mail server that does not answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from ...core.forks import after_fork

logger = logging.getLogger("django_delayq")

# The most lines that wait to be written: a few megabytes. Lines that do not fit are counted.
MOST_WAITING = 10_000
# The longest wait of a process that ends, for its last lines. Seconds.
FINISH_TIME = 2.0
# The longest wait of a process that forks, for the line that is being written: a lock of the project that the thread
# holds would stay locked in the child. Seconds.
PAUSE_TIME = 0.2
# In the threads with these names the project's own functions run. What they log by other loggers, they write.
PROJECT_THREADS = ("delayq-handler-", "delayq-event-loop", "delayq-sync-", "delayq-other")
# The thread of an embedded worker that does what the main thread of a worker process does.
EMBEDDED = "delayq-embedded"
# Functions with ``@worker_started`` run in the main thread too. The worker's own work there uses these packages.
LIBRARIES = ("django", "psycopg")


class LogWriter:
    """Makes calls that write, one after another in the order in which they come. Where it is stopped, at once.

    While it runs it handles what the logger ``django_delayq`` and its children log, and any logger in the worker's own
    threads, such as those of Django, each in the context of its caller. What a filter or a handler of the project
    raises is printed, and ends no thread.

    One process has one writer. The main thread starts and stops it, or those who run it meanwhile; any thread
    submits. ``_lock`` guards ``_thread``, ``_ends`` and ``_users``, and is held for a moment only. In ``_missing``
    each thread counts for itself. No lock is taken to submit: a handler may be interrupted there.
    """

    def __init__(self) -> None:
        self._begin()
        self._give_back: Callable[[], None] | None = None
        # Threads do not follow a fork. What waits here is written by the parent.
        after_fork(self._begin)

    def _begin(self) -> None:
        """Begin with nothing to write and no thread, also in a process that was just forked."""
        self._waiting: SimpleQueue[tuple[Callable[..., object], Sequence[Any]] | None] = SimpleQueue()
        # By thread: the number of lines that did not fit; and of these the number that the log has told of.
        self._missing: dict[int, int] = {}
        self._told = 0
        self._thread: threading.Thread | None = None
        self._ends = False
        # How many run it meanwhile, and whether what Django logs in the main thread is handled here.
        self._users = 0
        self._has_main = True
        self._lock = threading.Lock()

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that writes; None while the writer is stopped."""
        return self._thread

    def start(self) -> None:
        """Have lines written by the thread from now on. While the system gives none, they are written at once."""
        with self._lock:
            self._ends = False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="delayq-log", daemon=True)
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
        self._take_over()

    def stop(self, timeout: float) -> bool:
        """Write what waits, and end the thread. Return False if that takes longer than ``timeout`` seconds.

        Then the thread goes on, and what is submitted waits for it.
        """
        with self._lock:
            thread, self._ends = self._thread, True
        if thread is not None:
            self._waiting.put(None)
            thread.join(timeout)
            if thread.is_alive():
                return False
        if self._give_back is not None:
            self._give_back()
            self._give_back = None
        return True

    @contextlib.contextmanager
    def running(self, *, has_main: bool = True) -> Iterator[None]:
        """Run meanwhile. ``has_main``: the main thread is the worker's, and not that of a process with other work."""
        with self._lock:
            if self._thread is None:
                self._has_main = has_main
            # A caller of ``start`` ends it.
            counts = self._thread is None or self._users > 0
            self._users += counts
        if counts:
            self.start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= counts
                is_last = counts and not self._users
            if is_last:
                self.stop(FINISH_TIME)

    def fork(self) -> int:
        """Return what ``os.fork`` does. In the child the writer runs, and has nothing to write yet."""
        runs, pid = self._give_back is not None, -1
        self.stop(PAUSE_TIME)
        try:
            pid = os.fork()
        finally:
            if runs or pid == 0:
                self.start()
        return pid

    def submit(self, write: Callable[..., object], *given: Any) -> None:
        """Have a call made that writes a line. Returns at once while the writer runs."""
        if self._thread is None:
            _attempt(write, *given)
        elif self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((write, given))
        else:
            own = threading.get_ident()
            self._missing[own] = self._missing.get(own, 0) + 1

    def _run(self) -> None:
        """Write lines as they come, until the end. This is the thread."""
        while True:
            call = self._waiting.get()
            if call is not None:
                _attempt(call[0], *call[1])
                del call
            if self._waiting.qsize() <= MOST_WAITING // 2:
                self._tell_missing()
            with self._lock:
                if self._ends and self._waiting.empty():
                    self._thread = None
                    return

    def _tell_missing(self) -> None:
        number = sum(list(self._missing.values())) - self._told
        if number:
            self._told += number
            _attempt(logger.warning, "%d lines are missing here: the log took them too slowly", number)

    # --- between loggers and their handlers ---------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Have each record that a logger is to handle come here. Filters and handlers are asked in the thread."""
        if self._give_back is not None:
            return
        former = logging.Logger.handle

        def handle(own: logging.Logger, record: logging.LogRecord) -> None:
            thread = threading.current_thread()
            if thread is self._thread or not self._is_of_worker(own, thread):
                former(own, record)
            else:
                self.submit(contextvars.copy_context().run, former, own, record)

        def give_back() -> None:
            # Somebody else may have replaced it too.
            if logging.Logger.handle is handle:
                logging.Logger.handle = former  # type: ignore[method-assign]

        logging.Logger.handle = handle  # type: ignore[method-assign, assignment]
        self._give_back = give_back

    def _is_of_worker(self, own: logging.Logger, thread: threading.Thread) -> bool:
        """Return whether a line of this logger in this thread is one of the worker's."""
        package = own.name.partition(".")[0]
        if package == logger.name:
            return True
        if thread.name == EMBEDDED or (self._has_main and thread is threading.main_thread()):
            return package in LIBRARIES
        return thread.name.startswith("delayq-") and not thread.name.startswith(PROJECT_THREADS)


def _attempt(write: Callable[..., object], *given: object) -> None:
    """Write; print the traceback of a failure instead of raising it."""
    try:
        write(*given)
    except BaseException:  # noqa: BLE001
        # The stream may be closed.
        with contextlib.suppress(Exception):
            traceback.print_exc()


log_writer = LogWriter()


def try_to(tell: Callable[..., object], *arguments: Any, **facts: Any) -> None:
    """Log or signal something. What filters, handlers and receivers of the project raise there is printed.

    They may raise anything, and would raise again for a line about that.
    """
    try:
        tell(*arguments, **facts)
    except BaseException:  # noqa: BLE001
        print_error()


def print_error() -> None:
    """Have the error that is being handled printed."""
    log_writer.submit(_print, traceback.format_exc())


def _print(text: str) -> None:
    sys.stderr.write(text)

"""Starts worker processes, replaces those that die, and ends them in order. It runs no handler and waits for no log."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from django.db import connections as django_connections

from ...broker import publisher
from ...core import actors
from ...core.readable import wait_readable
from ...core.worker_options import Options
from ...project import registry
from ...record import crashes
from ...record.sql import statements
from ...record.sql.sessions import name_sessions
from ..shared import connections
from ..shared.due_services import backoff
from ..shared.log_writer import FINISH_TIME, log_writer, print_error
from ..shared.shared_state import ProcessLock, SharedState
from ..upkeep.heartbeat import HeartbeatFile
from . import output, plain_signals
from .process import BROKEN, EXHAUSTED, STUCK, WorkerProcess, collect_less_often
from .releases import TOGETHER, Child, Releases

logger = logging.getLogger("django_delayq")

# A child that lived longer than this was healthy: its successor starts at once. Seconds.
HEALTHY = 5.0
# The heartbeat file is touched no more when the consumer of a child has begun no turn for this long. Seconds.
STALE_AFTER = 30.0
# A child without a sign of life for this long (seconds), plus two of its longest leases and two graceful timeouts, is
# killed: code that never releases the interpreter's lock stops its timeouts too. Another worker has its messages then.
HUNG = 30.0
# A child in which a message is to run alone takes nothing meanwhile: it is replaced after this time. Seconds.
REPLACED_AFTER = 2.0
# The time between two checks of the children. Seconds.
CHILD_CHECK_INTERVAL = 1.0
# A worker that ends waits so long at most for the release of the claims of its children. Seconds.
FINAL_RELEASE = 5.0


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

    def __init__(self, options: Options) -> None:
        self.options = options
        self.heartbeat_file = HeartbeatFile(options.heartbeat_file) if options.heartbeat_file else None
        # Children that have reached --max-messages.
        self._exhausted = 0
        # The process that holds this lock may run a message alone.
        self.isolation_lock = ProcessLock()
        self.children: dict[int, Child] = {}
        self._signals = 0
        self._pid = os.getpid()
        self._stopping = False
        self._quick_deaths = 0
        self._start_after = 0.0
        self._is_refused = False
        self.releases = Releases(options, self._fork_to)
        self._over_at = time.monotonic() + (math.inf if options.max_runtime is None else options.max_runtime)
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
        checked = time.monotonic()
        while True:
            self._reap_children()
            self._act_on_signals()
            # Children that reach --max-messages finish what they have claimed and end by themselves.
            if (self._stopping or not self._wanted) and not self.children:
                return
            if self._stopping:
                # Children keep the graceful timeout themselves; this deadline is for one that hangs in its shutdown.
                deadline = deadline or time.monotonic() + 2 * self.options.graceful_timeout + 15
                if time.monotonic() > deadline:
                    self._kill()
            else:
                now = time.monotonic()
                self._kill_hung(now - checked)
                checked = now
                self._replace_in_order()
                self._start_missing()
                self._touch_heartbeat()
                self._end_in_time()
            self.releases.go_on()
            self._sleep(CHILD_CHECK_INTERVAL)

    def _end_in_time(self) -> None:
        """Stop at ``--max-runtime``: children end by themselves, but not those that die and are replaced again."""
        if time.monotonic() > self._over_at + CHILD_CHECK_INTERVAL:
            self._stop_children()

    # --- children -----------------------------------------------------------------------------------------------------

    def _replace_in_order(self) -> None:
        """Mark the children that make way for another one, and end when they hold nothing any more.

        In one a message is to run alone, which may take long; there is one place for this. The others are retired: no
        more of them finish than work, so that the handlers that run at once are less than twice those that were asked
        for.
        """
        for child in self.children.values():
            shared, since = child.shared, child.shared.suspect_since
            # Of each child that has made way, whether it is retired.
            finishing = [other.shared.retired for other in self.children.values() if other.shared.replaced]
            if shared.replaced:
                continue
            if shared.retired and sum(finishing) < self.options.processes:
                shared.replaced = True
            elif since and time.monotonic() - since > REPLACED_AFTER and all(finishing):
                shared.replaced = True
                logger.info("Worker process %s runs a message alone; another one takes its place", child.name)

    @property
    def _wanted(self) -> int:
        """The number of children that are to work: those that have reached ``--max-messages`` have no successors."""
        return self.options.processes - self._exhausted

    def _start_missing(self) -> None:
        """Start processes until there are as many as are wanted, without those that were replaced."""
        while time.monotonic() >= self._start_after:
            working = sum(not child.shared.replaced for child in self.children.values())
            if working >= self._wanted or len(self.children) >= self.options.most_processes:
                return
            try:
                self._fork()
                self._is_refused = False
            except OSError as error:
                # No process or no memory is left for it at the moment.
                self._start_after = time.monotonic() + CHILD_CHECK_INTERVAL
                if not self._is_refused:
                    logger.error("No worker process can be started; it is tried again: %s", error)
                self._is_refused = True

    def _fork(self) -> None:
        """Start one process."""
        shared = SharedState(self.options.threads, self.options.async_concurrency)
        run = actors.new_run()
        pid = self._fork_to(lambda: self._be_child(shared, run))
        name = actors.worker_name(self.options.name, pid, run)
        self.children[pid] = Child(pid, name, time.monotonic(), shared)
        logger.debug("Started worker process %s", name)

    def _fork_to(self, work: Callable[[], int]) -> int:
        """Start a process that does ``work``, ends with what that returns, and return its pid."""
        # The child must not share any connection that is open here.
        connections.close_all()
        django_connections.close_all()
        publisher.get.cache_clear()
        # What is left would be written by the child too.
        log_writer.put(output.flush)
        pid = log_writer.fork()
        if pid == 0:
            code = 1
            try:
                self._leave_the_supervisor()
                code = work()
            except BaseException:  # noqa: BLE001
                print_error()
            finally:
                log_writer.put(output.flush)
                log_writer.stop(FINISH_TIME)
                os._exit(code)
        return pid

    def _be_child(self, shared: SharedState, run: str) -> int:
        """Run a worker process, in the child. Return its exit code."""
        name = actors.worker_name(self.options.name, os.getpid(), run)
        process = WorkerProcess(self.options, self.isolation_lock, shared, name)
        collect_less_often()
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        if self._signals:
            # While the process was made.
            process.stop()
        plain_signals.switch(on=True)

        def ask() -> None:
            self._wake()
            process.look()

        def watch() -> bool:
            if not process.recorder.hangs:
                shared.show_life(process.beat)
            return self._is_orphaned()

        process.parts.budget.ask = ask
        code = process.run(watch)
        shared.ended = True
        return code

    def _leave_the_supervisor(self) -> None:
        """Take the signals and the end of the pipe that a child has, in the child."""
        signal.set_wakeup_fd(-1)
        # What a terminal sends reaches the whole group, and the parent decides. Ignored signals would stay so in the
        # programs that handlers start. SIGTERM is counted until there is a process to stop.
        for number in set(plain_signals.CAUGHT) - {signal.SIGTERM}:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._alive_write)

    def _is_orphaned(self) -> bool:
        """Return whether the supervisor is gone. Called in a child."""
        orphaned = bool(wait_readable([self._alive_read], 0))
        if orphaned:
            logger.error("The supervisor is gone; this process ends too")
        return orphaned

    def _reap_children(self) -> None:
        """Handle the death of each child that has died."""
        # -1: as PID 1 of a container this process inherits orphans of handlers too.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is not None:
                self._handle_death(child, os.waitstatus_to_exitcode(status))
            elif pid == self.releases.pid:
                self.releases.note_end(done=status == 0)

    def _handle_death(self, child: Child, code: int) -> None:
        """Have the claims of a dead child released, and decide when its successor starts."""
        ended = child.shared.ended
        if (not ended or code == BROKEN) and not child.killed:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            logger.error("Worker process %s died (%s)", child.name, how)
        if code != 0 or not ended:
            # The child is certainly dead: its claims need not wait for their leases.
            by_kill = code == -signal.SIGKILL and not child.hung
            child.died, child.death = time.monotonic(), crashes.Death(child.shared.begun, by_kill)
            self.releases.add(child, self.children.values())
        if self._stopping or (ended and child.shared.replaced):
            return
        if ended and code == EXHAUSTED:
            self._exhausted += 1
            return
        if ended and code == 0 and time.monotonic() >= self._over_at:
            # If no limit is reached, somebody sent a signal to this child alone, and it is replaced.
            self._stop_children()
            return
        lived = time.monotonic() - child.started
        self._quick_deaths = self._quick_deaths + 1 if lived < HEALTHY and not (ended and code == STUCK) else 0
        pause = backoff(self._quick_deaths - 1, 1.0) if self._quick_deaths > 1 else 0.0
        self._start_after = time.monotonic() + pause

    def _release_the_last(self) -> None:
        """Have all claims released, but wait for that for five seconds at most."""
        deadline = time.monotonic() + FINAL_RELEASE
        while self.releases.waiting and (left := deadline - time.monotonic()) > 0:
            self.releases.go_on(final=True)
            self._sleep(min(left, CHILD_CHECK_INTERVAL))
            self._reap_children()
        self.releases.kill()

    def _kill_hung(self, elapsed: float) -> None:
        """Kill children that show no life. Their deliveries count as crashed, as those of any process that dies."""
        longest = max((handler.lease for handler in registry.handlers().values()), default=0.0)
        limit = HUNG + 2 * (longest + self.options.graceful_timeout)
        for child in self.children.values():
            signs = child.shared.signs
            # While this process was frozen, its children may have been frozen too.
            child.silent = child.silent + min(elapsed, 2 * CHILD_CHECK_INTERVAL) if signs == child.signs else 0.0
            child.signs = signs
            if child.silent > limit:
                child.send(signal.SIGKILL)
                logger.critical("Worker process %s has shown no life for %d s; it is killed", child.name, child.silent)
                child.silent, child.hung = 0.0, True

    def _stop_children(self) -> None:
        """Have all children end in order."""
        self._stopping = True
        for child in self.children.values():
            child.send(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all children at once."""
        for child in self.children.values():
            child.send(signal.SIGKILL)
            if not child.killed:
                logger.warning("Worker process %s has not ended, and is killed", child.name)
            child.killed = True

    # --- signals, waiting, heartbeat ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Count the signals that end a worker while the loop runs: the first ends in order, the second at once.

        Also as PID 1, which has no default handlers.
        """

        def count(*_: object) -> None:
            self._signals += 1
            # The loop may be waiting for the database: the children get the signal at once.
            if os.getpid() == self._pid:
                for child in list(self.children.values()):
                    child.send(signal.SIGTERM)

        former = {number: signal.signal(number, count) for number in plain_signals.CAUGHT}
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        former_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)

    def _act_on_signals(self) -> None:
        """End in order after the first signal, at once after the second."""
        if self._signals and not self._stopping:
            self._stop_children()
            logger.info("Stopping: running handlers have %g s to finish", self.options.graceful_timeout)
        if self._signals > 1:
            self._kill()

    def _wake(self) -> None:
        """Have the loop look at the children at once. Called in a child."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal comes or a child is to be started."""
        if not self._stopping and self._start_after > time.monotonic():
            seconds = min(seconds, self._start_after - time.monotonic() + 0.001)
        if self.releases.is_soon:
            seconds = min(seconds, TOGETHER)
        wait_readable([self._wake_read], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _touch_heartbeat(self) -> None:
        """Touch the heartbeat file while the consumers of all children make turns that have begun to."""
        if self.heartbeat_file is None:
            return
        now = time.monotonic()
        if self._quick_deaths > 1 and any(now - child.started < HEALTHY for child in self.children.values()):
            # They die as soon as they are started.
            return
        # A function of the project may take minutes before the first turn of a successor.
        beats = [beat for child in self.children.values() if (beat := child.shared.beat)]
        if beats and now - min(beats) < STALE_AFTER:
            self.heartbeat_file.touch()

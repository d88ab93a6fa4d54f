"""Handlers that attack their worker. Each may harm its own message at most."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, transaction
from django.utils import timezone, translation
from psycopg import sql

from django_delayq import Reject, RetryLater, handler
from django_delayq.project.registry import Delivered
from tests.app.handlers import leave

SOON = ["0.05s"]
MEGABYTE = 2**20


def execute(statement: str, form: str = "text") -> None:
    """Execute a statement through Django, in one of the forms that psycopg takes."""
    given: Any = statement
    match form:
        case "bytes":
            given = statement.encode()
        case "composed":
            given = sql.SQL(" ").join(map(sql.SQL, statement.split()))
    with connection.cursor() as cursor:
        cursor.execute(given)


# --- those that end their process, or try -----------------------------------------------------------------------------


@handler("h.memory", retry=False)
def exhaust_memory(message: Delivered) -> None:
    """Ask for more memory than the process may have. A limit protects the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MEGABYTE, before[1]))
    try:
        hoard = []
        while True:
            hoard.append(bytearray(MEGABYTE))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@handler("h.exit")
def exit_at_once(message: Delivered) -> None:
    os._exit(message.payload)


@handler("h.recursion", retry=False)
def recurse(message: Delivered) -> None:
    recurse(message)


def fork_and_wait(message: Delivered) -> str | None:
    """Fork, and return the exit code of the child. The child comes out of the handler as the payload says."""
    child = os.fork()
    if child == 0:
        match message.payload:
            case "raises":
                raise RuntimeError("in the child")
            case "exits":
                raise SystemExit(3)
        return None
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise RuntimeError("the child lives on")
        time.sleep(0.01)
    return str(os.waitstatus_to_exitcode(ended[1]))


@handler("h.fork", retry=False)
def fork(message: Delivered) -> None:
    if (code := fork_and_wait(message)) is not None:
        leave(message, code)


handler("h.fork_tx", retry=False, transactional=True)(fork)


@handler("h.fork_async", retry=False)
async def fork_in_the_event_loop(message: Delivered) -> None:
    if (code := fork_and_wait(message)) is not None:
        await sync_to_async(leave)(message, code)


# --- those that meddle with the transaction ---------------------------------------------------------------------------


@handler("h.ends_its_transaction", transactional=True, retry=SOON)
def end_the_transaction(message: Delivered) -> None:
    leave(message)
    execute(message.payload["sql"], message.payload.get("form", "text"))
    if message.payload.get("then_fails"):
        raise RuntimeError("after all that")


@handler("h.ends_it_twice", transactional=True, retry=SOON)
def end_the_transaction_and_pretend(message: Delivered) -> None:
    leave(message)
    with contextlib.suppress(transaction.TransactionManagementError):
        execute("COMMIT")
    if message.deliveries == 1:
        raise RuntimeError("after all that")


@handler("h.raw_commit", transactional=True, retry=SOON)
def commit_behind_djangos_back(message: Delivered) -> None:
    leave(message)
    cast(Any, connection.connection).commit()
    if message.payload.get("then_asks"):
        # This statement begins another transaction.
        execute("SELECT 1")
    if message.payload.get("then_fails"):
        raise RuntimeError("after all that")


@handler("h.savepoints", transactional=True, retry=False)
def use_savepoints(message: Delivered) -> None:
    leave(message)
    with contextlib.suppress(RuntimeError), transaction.atomic():
        leave(message, "not to be")
        raise RuntimeError
    execute("SAVEPOINT mine")
    leave(message, "not to be")
    execute("ROLLBACK TO SAVEPOINT mine")
    execute("-- COMMIT\nSELECT 'COMMIT'")


@handler("h.set_rollback", transactional=True, retry=SOON)
def ask_for_a_rollback(message: Delivered) -> None:
    leave(message)
    if message.deliveries == 1:
        transaction.set_rollback(True)


@handler("h.swallow_without_a_word", transactional=True, retry=SOON)
def swallow_an_aborted_transaction(message: Delivered) -> None:
    """Swallow an error after which the database has aborted the transaction without Django's knowledge."""
    leave(message)
    if message.deliveries == 1:
        with contextlib.suppress(DatabaseError):
            execute("SELECT * FROM there_is_no_such_table")


@handler("h.closes_tx", transactional=True, retry=SOON)
def close_the_connection_in_the_transaction(message: Delivered) -> None:
    leave(message)
    if message.deliveries == 1:
        connection.close()


@handler("h.closes_raw_tx", transactional=True, retry=SOON)
def close_the_socket_in_the_transaction(message: Delivered) -> None:
    leave(message)
    if message.deliveries == 1:
        cast(Any, connection.connection).close()


@handler("h.closes")
def close_the_connection(message: Delivered) -> None:
    connection.ensure_connection()
    match message.payload:
        case "django":
            connection.close()
        case "raw":
            cast(Any, connection.connection).close()


# --- those that leave the next one a mess -----------------------------------------------------------------------------


@handler("h.sets")
def change_the_session(message: Delivered) -> None:
    for statement in message.payload["sql"]:
        execute(statement, message.payload.get("form", "text"))


handler("h.sets_tx", transactional=True)(change_the_session)


@handler("h.sets_async")
async def change_the_session_of_a_call(message: Delivered) -> None:
    await sync_to_async(change_the_session)(message)


@handler("h.session_async", retry=False)
async def show_the_session_of_a_call(message: Delivered) -> None:
    await sync_to_async(show_the_session)(message)


@handler("h.session", retry=False)
def show_the_session(message: Delivered) -> None:
    """Write down the settings of the session that this message finds in its thread."""
    found = {}
    if connection.vendor == "postgresql":
        for name in ("search_path", "TimeZone", "statement_timeout", "default_transaction_isolation", "role"):
            with connection.cursor() as cursor:
                cursor.execute(f"SHOW {name}")
                found[name] = cursor.fetchone()[0]
    else:
        for name in ("query_only", "foreign_keys"):
            with connection.cursor() as cursor:
                cursor.execute(f"PRAGMA {name}")
                found[name] = cursor.fetchone()[0]
    found["zone"] = timezone.get_current_timezone_name()
    found["language"] = translation.get_language()
    leave(message, repr(found))


@handler("h.activates")
def activate_and_forget(message: Delivered) -> None:
    timezone.activate("Asia/Kathmandu")
    translation.activate("de")


@handler("h.thread")
def leak_threads(message: Delivered) -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,)).start()


@handler("h.stdout")
def print_binary(message: Delivered) -> None:
    everything = bytes(range(256)) * 20
    sys.stdout.buffer.write(everything)
    sys.stdout.flush()
    os.write(1, everything)
    os.write(2, everything)
    print("\udcff" if sys.stdout.errors == "surrogateescape" else "ÿ")


@handler("h.closes_stdout")
def close_stdout(message: Delivered) -> None:
    sys.stdout.close()


# --- those that raise what cannot be told -----------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit("said while it was being told")

    __repr__ = __str__


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__
    __format__ = cast(Any, None)


def _chain() -> Exception:
    error: BaseException = ValueError("the first")
    for number in range(3000):
        error, error.__cause__ = ValueError(str(number)), None
        error.__cause__ = ValueError("before it")
    return cast(Exception, error)


def _circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


def _noted() -> Exception:
    error = ValueError("noted")
    error.add_note("a\x00b\ud800")
    return error


RAISES: dict[str, Callable[[], BaseException]] = {
    "unspeakable": Unspeakable,
    "exiting": Exiting,
    "nul": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "megabyte": lambda: ValueError("x" * MEGABYTE),
    "control": lambda: ValueError("\x1b[31m\r\nCRITICAL forged\n"),
    "not_text": lambda: ValueError(b"\xff", object()),
    "long_name": lambda: type("E" * 100_000, (Exception,), {})("named"),
    "nul_name": lambda: type("E\ud800", (Exception,), {})("named"),
    "chain": _chain,
    "circle": _circle,
    "group": lambda: ExceptionGroup("g", [Unspeakable(), ValueError("\x00")]),
    "notes": _noted,
    "reject_nul": lambda: Reject("a\x00b"),
    "reject_mute": lambda: Reject(cast(Any, Mute())),
    "reject_megabyte": lambda: Reject("x" * MEGABYTE),
    "later_mute": lambda: RetryLater(0, cast(Any, Mute())),
    "later_forever": lambda: RetryLater(1e9),
    "cancelled": asyncio.CancelledError,
    "generator_exit": GeneratorExit,
    "exit": lambda: SystemExit(3),
    "base": lambda: BaseException("not an Exception"),
    "keyboard": KeyboardInterrupt,
    "stop_iteration": StopIteration,
}


@handler("h.raises", retry=False)
def raise_it(message: Delivered) -> None:
    raise RAISES[message.payload]()


@handler("h.raises_tx", retry=False, transactional=True)
def raise_it_with_effects(message: Delivered) -> None:
    leave(message)
    raise RAISES[message.payload]()


@handler("h.raises_async", retry=False)
async def raise_it_async(message: Delivered) -> None:
    raise RAISES[message.payload]()


async def _raise_elsewhere(message: Delivered) -> None:
    """Await a task or a future that raises it: asyncio throws it into the task of the handler."""

    async def work() -> None:
        await asyncio.sleep(0)
        raise RAISES[message.payload]()

    if message.headers["awaits"] == "task":
        await asyncio.create_task(work())
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_exception, RAISES[message.payload]())
    await future


@handler("h.raises_awaited", retry=False)
async def await_what_raises_it(message: Delivered) -> None:
    await _raise_elsewhere(message)


@handler("h.raises_awaited_tx", retry=False, transactional=True)
async def await_what_raises_it_in_a_transaction(message: Delivered) -> None:
    await _raise_elsewhere(message)


@handler("h.raises_awaitable", retry=False)
def return_what_raises_it(message: Delivered) -> Any:
    return _raise_elsewhere(message)


def _bad_policy(attempt: int, error: BaseException | None) -> Any:
    return str(error)


@handler("h.bad_policy", retry=_bad_policy)
def fail_under_a_policy_that_fails(message: Delivered) -> None:
    raise Unspeakable

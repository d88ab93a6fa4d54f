"""``python -m testproject.demo``: the shop for ten seconds, on real servers, with Redis wiped in the middle.

The demo starts a Redis and a PostgreSQL of its own, unless REDIS_URL and DATABASE_URL name others, and a process of
``run_delayq``. It leaves nothing running, however it ends. Exit code 0: everything was delivered, and in time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from testproject.servers import PostgresServer, RedisServer, Server, ServerFailed, find_postgres, find_redis

ROOT = Path(__file__).resolve().parents[1]
USER = "demo"
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Django(Server):
    """A management command in a process that does not outlive this one."""

    clean_signal = signal.SIGTERM
    abrupt_signal = signal.SIGTERM

    def __init__(self, *arguments: str) -> None:
        super().__init__()
        self.arguments = arguments

    @property
    def url(self) -> str:
        """The address that the process listens on, if it listens."""
        return f"http://127.0.0.1:{self.port}/"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "django", *self.arguments]

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def _answers(self) -> bool:
        return True


class Worker(Django):
    """``run_delayq``. Ready when its row is in the table of workers."""

    def __init__(self) -> None:
        self.name = f"demo-{os.getpid()}"
        super().__init__("run_delayq", "--worker-name", self.name, "--graceful-timeout", "5s")

    def _answers(self) -> bool:
        from django_delayq.models import Worker as WorkerRow

        return WorkerRow.objects.filter(name__startswith=f"{self.name}/").exists()


class Site(Django):
    """``runserver``. Ready when its port accepts connections."""

    def __init__(self, port: int | None) -> None:
        super().__init__()
        self.port = port or self.port
        self.arguments = ("runserver", "--noreload", f"127.0.0.1:{self.port}")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    options = _parse(arguments)
    for number in END_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with ExitStack() as stack:
            code = _run(options, stack)
        print("\nEnded; nothing is left running.")
        return code
    except KeyboardInterrupt:
        print("\nInterrupted; nothing is left running.")
        return 130
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1


def _interrupt(number: int, frame: object) -> None:
    """End in order, once: terminals and tools often send several signals."""
    for other in END_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--serve", action="store_true", help="leave the admin running at the end, until Ctrl-C")
    parser.add_argument("--port", type=int, help="the port of the admin (default: any free port)")
    options = parser.parse_args(arguments)
    if options.port is not None:
        options.serve = True
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", options.port))
            except (OSError, OverflowError) as error:
                parser.error(f"--port {options.port}: {error}")
    return options


def _run(options: argparse.Namespace, stack: ExitStack) -> int:
    from testproject.shop.bank import Bank

    print("django-delayq: PostgreSQL decides, Redis times.\n")
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.demo_settings"
    os.environ["SHOP_CALLBACK_URL"] = stack.enter_context(Bank(refusals=2)).url
    worker = Worker()
    stack.callback(worker.close)
    redis, database = _choose_redis(stack), _choose_database(stack, worker.directory)
    _set_up_django()
    _say("Redis", redis)
    _say("Database", database)
    worker.start()
    _say("Worker", "manage.py run_delayq, a process of its own")

    from testproject.show import Show

    show = Show(own_redis="REDIS_URL" not in _given)
    healthy = show.run()
    if not healthy:
        print("\nThe worker's log ends with:", *worker.log.read_text(errors="replace").splitlines()[-15:], sep="\n  ")
    if options.serve:
        _serve(stack, options.port)
    else:
        print("\nTo look around in the admin, run the demo with --serve (tox -e demo -- --serve).")
    return 0 if healthy else 1


# The variables that the user's environment sets; the demo sets others.
_given: set[str] = {name for name in ("REDIS_URL", "DATABASE_URL", "SQLITE_PATH") if os.environ.get(name)}


def _choose_redis(stack: ExitStack) -> str:
    if "REDIS_URL" in _given:
        return "the one of REDIS_URL; only keys of this demo are touched"
    if not find_redis():
        os.environ.pop("REDIS_URL", None)
        return "none found: messages are delivered by query, up to a second late"
    server = stack.enter_context(RedisServer())
    os.environ["REDIS_URL"] = server.url
    return f"{server.url}, started for this demo"


def _choose_database(stack: ExitStack, folder: Path) -> str:
    if "DATABASE_URL" in _given:
        return "the one of DATABASE_URL; the shop's tables stay in it"
    if "SQLITE_PATH" in _given:
        return "SQLite, the file of SQLITE_PATH"
    if find_postgres():
        server = stack.enter_context(PostgresServer())
        os.environ["DATABASE_URL"] = server.url
        return f"{server.url}, started for this demo"
    os.environ["SQLITE_PATH"] = str(folder / "shop.sqlite3")
    return "SQLite, a file for this demo (no PostgreSQL found)"


def _set_up_django() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    # The demo makes a request that is refused: that is no error to log.
    logging.getLogger("django.request").setLevel(logging.CRITICAL)
    call_command("migrate", verbosity=0, interactive=False)


def _serve(stack: ExitStack, port: int | None) -> None:
    """Leave the admin running until Ctrl-C."""
    from django.contrib.auth import get_user_model

    users = get_user_model().objects
    password = secrets.token_urlsafe(6)
    users.filter(username=USER).delete()
    users.create_superuser(USER, password=password)
    stack.callback(users.filter(username=USER).delete)

    from testproject import samples

    stack.callback(samples.clear)
    print(samples.leave(), end="")
    site = stack.enter_context(Site(port))
    print(f"\nThe admin: {site.url}admin/   user: {USER}   password: {password}   (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while site.running:
            time.sleep(0.5)


def _say(what: str, text: str) -> None:
    print(f"  {what:<9} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

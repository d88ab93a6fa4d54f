"""``python -m tests.torture.canceller`` cancels messages around their due time and notes every answer."""

from __future__ import annotations

import sys
import time

import django

from tests.torture.journal import Journal

DUE = "SELECT id FROM torture.sched WHERE cancel_at <= clock_timestamp() AND NOT id = ANY(%s) ORDER BY cancel_at"


def main(until: float) -> None:
    from django.db import Error, connection

    from django_delayq import cancel_message

    journal = Journal.of("canceller")
    done: list[int] = []
    while time.time() < until:
        time.sleep(0.03)
        try:
            with connection.cursor() as cursor:
                cursor.execute(DUE, [done])
                ids = [row[0] for row in cursor.fetchall()]
            for pk in ids:
                done.append(pk)
                journal.write("asked", id=pk)
                answer = cancel_message(pk)
                journal.write("answered", id=pk, verdict=str(answer.verdict))
        except Error as error:
            journal.write("unknown", error=type(error).__name__)
            connection.close()
            time.sleep(0.1)


if __name__ == "__main__":
    django.setup()
    main(float(sys.argv[1]))

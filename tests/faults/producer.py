"""Schedules messages, each in a transaction that also writes a row to a table of the business.

``python -m tests.faults.producer QUEUE FILE FROM TO``
"""

from __future__ import annotations

import logging
import sys

import django

logger = logging.getLogger("django_delayq")


def main(queue: str, lines: str, first: int, last: int) -> None:
    from django.db import close_old_connections

    from tests.faults.messages import schedule

    for number in range(first, last):
        # As Django does between two requests.
        close_old_connections()
        try:
            schedule(queue, lines, number)
        except Exception as error:  # noqa: BLE001
            logger.warning("Message %d was not scheduled: %s", number, error)
    logger.warning("All are scheduled")


if __name__ == "__main__":
    django.setup()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

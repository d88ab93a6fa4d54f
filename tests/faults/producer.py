"""Schedules messages, each in a transaction that also writes a row to a table of the business.

``python -m tests.faults.producer QUEUE FILE``
"""

from __future__ import annotations

import logging
import sys

import django

logger = logging.getLogger("django_delayq")


def main(queue: str, lines: str) -> None:
    from django.db import close_old_connections

    from tests.faults.messages import NUMBER, schedule

    for number in range(NUMBER):
        # As Django does between two requests.
        close_old_connections()
        try:
            schedule(queue, lines, number)
        except Exception as error:  # noqa: BLE001
            logger.warning("Message %d was not scheduled: %s", number, error)
    logger.warning("All are scheduled")


if __name__ == "__main__":
    django.setup()
    main(*sys.argv[1:])

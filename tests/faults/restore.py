"""Restores a queue in small batches, so that a fault meets a restore between two of them."""

from __future__ import annotations

import sys

import django


def main(queue: str) -> None:
    django.setup()
    from django_delayq.broker import index
    from django_delayq.restore.engine import Restore
    from django_delayq.restore.selection import Selection

    broker = index("default")
    assert broker is not None
    job = Restore("default", broker, Selection(queues=(queue,)), batch_size=5)
    job.preview()
    job.run()


if __name__ == "__main__":
    main(sys.argv[1])

"""``python -m tests.torture.rivals SEED`` requeues and purges the same dead messages at once, and notes all."""

from __future__ import annotations

import random
import sys
import threading
import time

import django

from tests.torture.journal import Journal

# Messages over which they quarrel at once.
BATCH = 5


class Rivals:
    """Three threads: one requeues what they are given together, one requeues each by itself, and one purges."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.journal = Journal.of("rivals")
        self.barrier = threading.Barrier(3)

    def run(self) -> None:
        """Share out all messages that are dead now."""
        from django_delayq.core.states import State
        from django_delayq.models import Message

        ids = list(Message.objects.filter(topic="torture.refuse", state=State.DEAD).values_list("pk", flat=True))
        self.random.shuffle(ids)
        batches = [ids[begin : begin + BATCH] for begin in range(0, len(ids), BATCH)]
        others = [threading.Thread(target=rival, args=(batches,)) for rival in (self.purge, self.requeue_each)]
        for thread in others:
            thread.start()
        self.requeue(batches)
        for thread in others:
            thread.join()

    def meet(self) -> None:
        """Wait for the other threads, then for a moment: which comes first differs from batch to batch."""
        self.barrier.wait()
        time.sleep(self.random.uniform(0, 0.03))

    def requeue(self, batches: list[list[int]]) -> None:
        from django_delayq import Verdict, requeue_message
        from django_delayq.models import Message

        for ids in batches:
            self.meet()
            answers = requeue_message(Message.objects.filter(pk__in=ids))
            self.journal.write("requeued", number=answers[Verdict.REQUEUED])

    def requeue_each(self, batches: list[list[int]]) -> None:
        from django.db import connection

        from django_delayq import Verdict, requeue_message

        for ids in batches:
            self.meet()
            answers = [requeue_message(pk).verdict for pk in ids]
            self.journal.write("requeued", number=answers.count(Verdict.REQUEUED))
        connection.close()

    def purge(self, batches: list[list[int]]) -> None:
        from django.db import connection

        from django_delayq.core.states import State
        from django_delayq.record import purge

        dead = purge.finished("default", [State.DEAD], 0).filter(topic="torture.refuse")
        for ids in batches:
            self.meet()
            self.journal.write("purged", number=sum(purge.purge(dead.filter(pk__in=ids))))
        connection.close()


if __name__ == "__main__":
    django.setup()
    Rivals(sys.argv[1]).run()

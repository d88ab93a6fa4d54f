"""Captions: the texts above the table of each workload in the documentation."""

from __future__ import annotations

TARGETS = (
    "The rows that compare are medians of ratios within a round. *The fastest durable peer* is the fastest system that"
    " has written the message to disk when the call returns. :doc:`performance-history` says where the time goes."
)
FEATURES = (
    "A system that keeps messages in Redis' memory has less to do than one that writes each of them, and each step, to"
    " disk. This table says what each system does for its time."
)
CAPTIONS = {
    "schedule": (
        "One process with one connection; the message is committed, or in Redis, when the call returns."
        " *client* and *servers* is the CPU time per message in the scheduling process, and in Redis and PostgreSQL."
    ),
    "schedule-beyond": "No worker needs to know of such a message yet, so nothing is sent to Redis.",
    "schedule-inside": "A hundred messages in each transaction, as in a view that does other work too.",
    "schedule-bulk": "With the call that each system has for many messages; a system without one is left out.",
    "drain": (
        "Messages that are due wait; then one worker process starts. The time runs from the first message handled to"
        " the last; for django-delayq to the commit of the last outcome with its log."
    ),
    "drain-2": "The same on two cores, which the servers share.",
    "drain-query": "No Redis is set: a query finds what is due, a thousand messages at a time.",
    "insert": (
        "The handler inserts a row: with django-delayq through the ORM, in the transaction that records the success, so"
        " exactly once. Peers insert with psycopg in a transaction of their own, which is quicker, and repeat it when"
        " the task is repeated."
    ),
    "insert-2": "The same with two worker processes, for django-delayq alone.",
    "limits": (
        "The handler has a limit of one for each limit key, and each key has two messages. Then a hundred"
        " messages for each of fewer keys, so that nearly all have to wait, and begin one after another."
    ),
    "late-200": (
        "How long after its due time each message was handled. *early* counts those handled before it, *missing* those"
        " not handled within 35 s, and *sent* is the rate that the sender reached."
    ),
    "late-1000": "The same with five times as many. A system that drains fewer than that in a second takes no part.",
    "late-queues": "As for a project with a queue for each tenant: one worker process serves them all.",
    "late-3000": (
        "One process sends, thirty messages with each call, while two worker processes run: all on two cores, which"
        " the servers share. The CPU time is for each message."
    ),
    "late-long": (
        "A stream of ten minutes (``--size full``) or one, with a checkpoint in its middle and at its end, and with"
        " autovacuum as PostgreSQL has it by default. *pauses* counts the times when handlers began more than 50 ms"
        " late, *checkpoints* and *vacuums* what the database did meanwhile."
    ),
    "new-queue": (
        "From the call to the handler, for messages that are due at once, four a second: twenty queues without any"
        " message before; between them messages of the default queue, and of twenty topics without any message before."
    ),
    "purge": (
        "Finished messages (five million with ``--size full``) are past their retention time, and a worker prunes them"
        " while it delivers; in turns with a worker whose retention time is longer. *purged*: how many of them went in"
        " a second."
    ),
    "async": (
        "The handler waits, as for an answer from another system: with django-delayq, SAQ, arq, taskiq and"
        " Procrastinate as tasks on one event loop, with Celery in threads and in greenlets. 500"
        " at once could end 5,000 in a second."
    ),
    "async-late": "How late such handlers began. taskiq is left out: its delays need a scheduler of their own.",
    "idle": "Commands to Redis and statements to PostgreSQL, per second, by a worker process with nothing to do.",
    "memory": (
        "The growth of Redis' ``used_memory`` for each of some thousand waiting messages, within the horizon and beyond"
        " it. The sorted set alone takes 103 bytes a message when it holds a million."
    ),
    "life": (
        "Write-ahead log and disk for each message from its schedule to its end, with its log. *flowing*: of messages"
        " that fall due one by one, which take more commits than a backlog."
    ),
    "restore": (
        "``delayq_restore`` of messages due in no order (a million with ``--size full``), with the start of the"
        " command. *vacuumed*: of rows that a vacuum has seen."
    ),
    "recovery": "From the SIGKILL until all hundred messages have been handled again by another process.",
    "recurring": (
        "One process makes and runs the occurrences. *late*: how long after its time each one ran, before the first"
        " SIGKILL of that process. It is killed while it runs the occurrences of a second, and started again each time."
        " *missing*: times for which nothing ran, up to 35 s after the end. *doubled*: further runs for the same time."
        " Each system makes up for times that it missed, as far as it can: Celery beat goes on from its last run, and"
        " tells no task its time, so that its runs are only counted. The CPU is for each occurrence, before the first"
        " SIGKILL. django-q2 is left out: its schedules have whole minutes."
    ),
    "burst": (
        "Messages that fall due within one second (a million with ``--size full``), and one worker process. Meanwhile"
        " another client pings Redis, and five messages with the highest priority are scheduled."
    ),
    "growth-waiting": (
        "What one message costs while others wait, and *with none*: measured in turns on a second, empty set of tables."
    ),
    "growth-history": "The same while more and more finished messages, with their log, are kept.",
    "growth-processes": "The rate of a backlog by the number of worker processes, on two cores that the servers share.",
}

"""The bounds of what a message may hold: calls check them, columns and constraints are made for them."""

from __future__ import annotations

from datetime import timedelta

# Characters of a topic, of the name of a queue, and of a key.
TOPIC_LENGTH = 100
QUEUE_LENGTH = 64
KEY_LENGTH = 200
# The least and the greatest priority.
PRIORITIES = (-100, 100)
# A message that has not started this long after its due time counts as overdue, in statistics, checks and restores.
OVERDUE_AFTER = timedelta(seconds=5)

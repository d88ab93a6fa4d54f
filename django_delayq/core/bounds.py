"""The bounds of messages: what one may hold, and when it counts as overdue."""

from __future__ import annotations

from datetime import timedelta

# A topic has at most this many characters.
TOPIC_LENGTH = 100
# The name of a queue has at most this many characters.
QUEUE_LENGTH = 64
# A key has at most this many characters.
KEY_LENGTH = 200
# The kind of an error is kept up to this many characters.
KIND_LENGTH = 200
# The path of an exception's class is kept up to this many characters.
CLASS_LENGTH = 200
# The least and the greatest priority.
PRIORITIES = (-100, 100)
# A message that has not started this long after its due time counts as overdue, in statistics, checks and restores.
OVERDUE_AFTER = timedelta(seconds=5)

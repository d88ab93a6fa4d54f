"""Takes messages into programs that are no workers, and answers them: ``take``, then ``ack`` or another answer.

The queues are declared in ``DELAYQ["PULL_QUEUES"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import at_first_use

if TYPE_CHECKING:
    from .answering import Answered, aack, ack, aextend, areject, arelease, aretry, extend, reject, release, retry
    from .receipts import InvalidReceipt
    from .taking import Pulled, atake, take

_ANSWERS = ["ack", "retry", "reject", "release", "extend", "aack", "aretry", "areject", "arelease", "aextend"]
# The names are loaded at first use: to import the package takes no models.
_HOME = {
    **dict.fromkeys(["take", "atake", "Pulled"], "taking"),
    **dict.fromkeys([*_ANSWERS, "Answered"], "answering"),
    "InvalidReceipt": "receipts",
}
_MEANT = {
    **dict.fromkeys(("consume", "fetch", "get", "poll", "pop", "receive"), "take"),
    **dict.fromkeys(("complete", "delete", "done", "finish"), "ack"),
    **dict.fromkeys(("nack", "nak"), "retry, or release"),
}

__all__ = ["Answered", "InvalidReceipt", "Pulled", "ack", "extend", "reject", "release", "retry", "take"]
__all__ += ["aack", "aextend", "areject", "arelease", "aretry", "atake"]

# A type checker would take any name for one that there is.
if not TYPE_CHECKING:
    __getattr__ = at_first_use(__name__, _HOME, _MEANT)

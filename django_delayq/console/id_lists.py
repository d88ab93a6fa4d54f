"""Lists of ids as a short text, as operations and tokens keep them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise


def packed(ids: Sequence[int]) -> str:
    """Return ids, or other numbers, as a short text: the differences between them, compressed."""
    differences = ",".join(str(after - before) for before, after in pairwise((0, *ids)))
    return base64.b85encode(zlib.compress(differences.encode())).decode()


def unpacked(text: str) -> tuple[int, ...]:
    """Return the ids that ``packed`` wrote."""
    differences = zlib.decompress(base64.b85decode(text)).decode() if text else ""
    return tuple(accumulate(map(int, differences.split(",")))) if differences else ()

"""The one exception of this package."""

from __future__ import annotations


class ProtocolError(RuntimeError):
    """A call that the protocol forbids: a double refund, an older version, an illegal transition. Nothing changed."""

"""What a metric raises where its weights or its package are not here."""

from __future__ import annotations


class NotAvailable(ValueError):
    """The metric cannot be computed on this machine; the message says why and what to do."""

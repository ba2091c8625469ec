"""The papers' figures from a study's data: PNG, SVG and the numbers beside them."""

from videokv.report.figures.sets import save_diagnostics, save_memory, save_tradeoff

__all__ = ["save_diagnostics", "save_memory", "save_tradeoff"]

"""What quantization does to attention, with the same queries and the same current chunk."""

from videokv.diagnostics.compare import Diagnosis, diagnose
from videokv.diagnostics.energy import cumulative_energy
from videokv.diagnostics.scores import Past

__all__ = ["Diagnosis", "Past", "cumulative_energy", "diagnose"]

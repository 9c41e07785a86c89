"""What positions do inside a trained model: attention, states, how far they moved, how stable both are."""

from tape_pe.analysis.capture import LayerView, capture
from tape_pe.analysis.stability import Stability, measure_stability

__all__ = ["LayerView", "Stability", "capture", "measure_stability"]

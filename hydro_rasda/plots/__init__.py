"""Figures of a run. Each function takes the result of `tune` or `hydro_rasda.load`, and returns a Plotly figure.

The functions work for finished, running, interrupted and empty runs; a figure without data says why it is empty.
They need the extra `hydro-rasda[report]`.
"""

from hydro_rasda.plots.curves import best_over_time, learning_curves
from hydro_rasda.plots.finalists_front_population import front, narrow_vs_full, population
from hydro_rasda.plots.hyperparameters import importances, parallel_coordinates, score_map, slices
from hydro_rasda.plots.timeline_and_cost import cost, timeline

__all__ = ["best_over_time", "cost", "front", "importances", "learning_curves", "narrow_vs_full"]
__all__ += ["parallel_coordinates", "population", "score_map", "slices", "timeline"]

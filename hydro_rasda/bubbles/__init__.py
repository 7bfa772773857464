"""Trials in the bubbles of somebody else's pipeline: while the host waits for its neighbour, a guest trains.

A guest is a process of its own beside each rank. The kernel stops it whenever the host does not wait. It shares no
process with the host, so that neither random numbers, gradients, threads nor collectives can meet. The idea is that of
Hydro's coordinator, which interleaves trials with the pre-training of large models.
"""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from hydro_rasda.bubbles.bubble_backend import BubbleBackend as BubbleBackend
    from hydro_rasda.bubbles.host import bubbles as bubbles
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)

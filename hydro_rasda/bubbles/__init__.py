"""Trials in the bubbles of another pipeline: while a rank of this host waits for its neighbor, a guest trains.

The host is a pipeline in training. A guest is a separate process beside each of its ranks, and the kernel stops the
guest whenever the rank does not wait. So guest and host cannot affect each other's random numbers, gradients, threads
or collectives. The idea is that of Hydro's coordinator, which interleaves trials with the pre-training of large models.
"""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from hydro_rasda.bubbles.bubble_backend import BubbleBackend as BubbleBackend
    from hydro_rasda.bubbles.host import bubbles as bubbles
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)

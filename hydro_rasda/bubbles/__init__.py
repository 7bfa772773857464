"""Train trials in the bubbles of another training, the host: while one of its ranks waits, a guest trains.

The host trains in pipeline parallelism. A bubble is a time in which one of its ranks waits for a neighbor. A guest is a
separate process beside each rank. On a CPU, the kernel stops the guest whenever the rank does not wait. As separate
processes, guest and host cannot affect each other's random numbers, gradients, threads or collectives. The idea is that
of Hydro's coordinator, which interleaves trials with the pre-training of large models.
"""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from hydro_rasda.bubbles.bubble_backend import BubbleBackend as BubbleBackend
    from hydro_rasda.bubbles.host import bubbles as bubbles
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)

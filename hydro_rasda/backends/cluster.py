"""Ray: halving in time and doubling in space, for any Ray Tune script.

Importing this starts no Ray; ``tune.Tuner(...).fit()`` does, or ``ray.init``.
"""

from hydro_rasda.backends.elastic import elastic
from hydro_rasda.backends.large_batch import RescaledLR, lr_factor
from hydro_rasda.backends.ray_journal import Entry, read_journal
from hydro_rasda.backends.ray_scheduler import RASDAScheduler
from hydro_rasda.backends.worker import Worker

__all__ = ["Entry", "RASDAScheduler", "RescaledLR", "Worker", "elastic", "lr_factor", "read_journal"]

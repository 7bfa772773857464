"""Many jobs on few devices: scripts or functions that share GPUs or the cores of this machine. Linux only."""

from hydro_rasda.packing.devices import Device, cpu, gpus
from hydro_rasda.packing.job_states import JobRecord, PackResult
from hydro_rasda.packing.pack import pack
from hydro_rasda.packing.tasks import Estimate, Task

__all__ = ["Device", "Estimate", "JobRecord", "PackResult", "Task", "cpu", "gpus", "pack"]

"""What reports tell about growth that pays, and the names that they tell it by."""

EPOCH_SECONDS = "epoch_seconds"
"""In a report, its epoch's own time: without starts and waits, and without what follows the epoch."""

NOISE_SCALE = "gradient_noise_scale"
"""In a report, the trial's gradient noise scale, in examples; `GLOBAL_BATCH` must be beside it."""

SCALING_EFFICIENCY = "scaling_efficiency"
"""In a report, the trial's parallel efficiency, compared with the fewest workers that it has had."""

GLOBAL_BATCH = "global_batch_size"
"""In a report, the examples of a step over all workers."""

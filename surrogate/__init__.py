"""A narrow stand-in for a wide model, in maximal update parametrization relative to it."""

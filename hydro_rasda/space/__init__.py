"""Search spaces: distributions, branches, sampling, and checks."""

"""The space that is searched: distributions, branches, samples, and the checks of all three."""

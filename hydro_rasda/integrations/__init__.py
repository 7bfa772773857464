"""Tuning for users of other libraries: each module needs the library of its name, and has an extra of that name."""

"""Tuning for users of other libraries. Each module has the name of its library; the extra of that name installs it."""

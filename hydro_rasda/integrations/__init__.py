"""Tuning what other libraries train: each module needs the library that it is named after, in an extra of that name."""

"""Places at which trials train: in this process, on a Ray cluster, or in virtual time."""

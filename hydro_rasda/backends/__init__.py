"""The backends, on which trials train: this process, several processes of this machine, or a Ray cluster."""

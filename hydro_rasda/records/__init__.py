"""A run as its journal tells it: trials, costs, summary, timeline, and the texts for people."""

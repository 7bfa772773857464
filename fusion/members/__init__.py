"""K modules as one: stacked, kept, copied, joined, and taken apart again."""

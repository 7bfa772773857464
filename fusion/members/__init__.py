"""Fused models: K modules are stacked into one, and can be kept, copied, joined and taken apart again."""

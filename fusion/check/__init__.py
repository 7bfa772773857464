"""Checks before training: a dry run, and a comparison of fused members with the same members trained alone."""

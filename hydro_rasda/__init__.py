"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

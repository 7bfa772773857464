"""Many models as one: K same-shaped modules stacked, trained by one forward, one backward, one optimizer step."""

"""The ground of all rooms: checks of arguments, texts, masks of secrets, seeds, `Trial`. It needs no torch."""

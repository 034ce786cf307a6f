"""Records the notifications of a group in the store: written once per change, read by revision."""

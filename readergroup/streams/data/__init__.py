"""How events lie in a segment, and reading them."""

"""Authentication and per-model authorization: tokens, grants."""

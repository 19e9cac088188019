"""Start scripts of the systems beside Iskander; each runs in that system's own environment."""

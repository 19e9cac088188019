"""Which model versions are served: wanted, loaded beside the others, put in place, let go."""

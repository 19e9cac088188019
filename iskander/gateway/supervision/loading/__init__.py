"""Loads of model versions by workers, and models that end them."""

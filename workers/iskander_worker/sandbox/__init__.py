"""Sandboxed load: a new model is first loaded in a child process with limits."""

"""Commands that read a configuration as a start does, without starting a server."""

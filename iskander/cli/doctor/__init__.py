"""Checks of a machine for a gateway: facts, demand of a configuration, findings."""

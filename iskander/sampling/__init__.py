"""Process that observes sampled requests, for the prediction log and other consumers.

Its gateway side is `iskander.gateway.observation`. It is a process of its own, so that encoding,
files and object stores use no time of the gateway's event loop.
"""

"""Event stream: completed requests and changes of workers and models, by ZeroMQ.

The recorder and the log events pass events to the publisher, whose socket has the subscribers. For
several gateway processes, the parent's forwarder has one address for all.
"""

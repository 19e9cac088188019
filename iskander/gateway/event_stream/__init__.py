"""Event stream: completed requests and changes of workers and models, as server-sent events.

The recorder and the log events pass events to the publisher, which keeps the last ones. The
subscribers read them at the admin port. Of several gateway processes, the parent has the
subscribers, and the others send it their events.
"""

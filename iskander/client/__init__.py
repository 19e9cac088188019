"""A small Flight client: batches in, predictions out, errors by name.

Nothing here is special to this server's inside: it is pyarrow.flight, with reading and writing at
once (a client that writes everything before it reads stops for ever on flow control), with the
server's error detail turned back into `IskanderError`, and with large batches handed over in shared
memory where client and server are one machine's and the client asks for that.

Runs on: the caller's threads; never in the gateway.
"""

from iskander.client.connection import CALL_TIMEOUT_S, Client, Item, Tls

__all__ = ["CALL_TIMEOUT_S", "Client", "Item", "Tls"]

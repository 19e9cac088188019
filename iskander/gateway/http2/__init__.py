"""gRPC over HTTP/2 as a server speaks it, on the gateway's own loop.

    listener     sockets, connections, keepalive, the orderly end
    connection   frames in and out, flow control, what a peer may cost
    call         one gRPC call: messages both ways, deadline, status
    headers      header blocks: which method, what metadata, until when
    frames       the bytes of frames

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library `hpack`), gRPC over HTTP/2.
"""

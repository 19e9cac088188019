"""gRPC over HTTP/2 as a server speaks it, on the gateway's own loop.

    listener     sockets, connections, keepalive, the orderly end
    connection   frames as they come in, and what is done about each
    output       what goes out: flow control, and whose turn it is
    call         one gRPC call: messages both ways, deadline, status
    headers      header blocks: which method, what metadata, until when
    patience     what a peer may cost
    frames       the bytes of frames
    status       how calls end

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library `hpack`), gRPC over HTTP/2.
"""

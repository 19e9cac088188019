"""gRPC over HTTP/2 as a server speaks it, on the gateway's own loop.

    listener       sockets, connections, keepalive, the orderly end
    connection     preface, frames, turns of the loop, timeouts
    streams        stream states, DATA and HEADERS, opening calls
    call           one gRPC call: messages both ways, deadline, status
    header_blocks  header blocks of requests: assembly, decoding, bounds
    request_head   validation of request headers; path, timeout, metadata
    headers        header blocks of responses
    output         frames out: flow control, and the order of calls
    rate_limit     frames that carry nothing, and processor time without progress
    room           room for large messages on one connection
    frames         bytes of frames
    status         gRPC status codes

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library `hpack`), gRPC over HTTP/2.
"""

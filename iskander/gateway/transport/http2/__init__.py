"""gRPC server transport over HTTP/2, on the gateway's event loop.

    listener             listening sockets, and the resources that connections share
    connection           connection preface, frame dispatch, time quanta, timeouts
    streams              stream states, DATA and HEADERS frames, call creation
    call                 one gRPC call: responses, deadline, status
    call_receiver        request messages of a call: assembly, memory, flow-control window
    decompression        gzip and deflate messages
    header_block_reader  request header blocks: assembly, HPACK decoding, limits
    request_headers      request header validation; path, timeout, metadata
    response_headers     response header blocks and trailers
    frame_sender         outgoing frames: flow control, round robin over calls
    frames               frame encoding and parsing
    rate_limit           limits on frames and CPU time without a message
    status               gRPC status codes

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library `hpack`), gRPC over HTTP/2.
"""

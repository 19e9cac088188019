"""Client side of the Open Inference Protocol, for the backend `remote`.

    messages    requests and responses as bytes
    tensors     arrays in the protocol's raw form
    statuses    errors of calls as named errors
    server      the servers of one model: connections, headers, attempts

Runs on: worker main, of a remote model.
"""

"""HTTP/1.1 listeners on the gateway loop, with the protocol of uvicorn and h11."""

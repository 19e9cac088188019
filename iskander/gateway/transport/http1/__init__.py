"""HTTP/1.1 listener on the gateway loop, based on uvicorn and h11."""

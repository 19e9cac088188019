"""HTTP/1.1 listener on the gateway loop: asyncio and h11, with an ASGI application."""

"""Arrow Flight: discovery, actions and DoExchange streams."""

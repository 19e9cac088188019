"""Process that plans and reads sources for the gateway, with parts of `iskander.lake`."""

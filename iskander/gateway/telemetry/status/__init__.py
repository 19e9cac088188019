"""State of a server for people: statistics, status, their history."""

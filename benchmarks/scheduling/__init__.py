"""What scheduling gains: fleets in virtual time and over real streams, and overload."""

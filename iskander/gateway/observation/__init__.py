"""Gateway side of observation: sampling, held leases, and the observer process."""

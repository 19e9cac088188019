"""The run of a job: its units, their flow, the private server, progress and report."""

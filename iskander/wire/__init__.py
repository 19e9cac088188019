"""What gateway and worker say to each other, and over what."""

"""What is seen from outside: measures, metrics, stats, and the admin port."""

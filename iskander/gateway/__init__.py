"""The gateway process: composition root, several processes, signals, systemd."""

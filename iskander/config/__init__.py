"""Configuration: declaration of every setting, loader, reference pages."""

"""Configs of models in the wild, parsed into specs."""

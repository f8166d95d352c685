"""Runs of recipes on this machine."""

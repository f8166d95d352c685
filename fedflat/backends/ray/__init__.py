"""Clients as Ray tasks."""

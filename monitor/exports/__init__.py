"""Recordings for other programs: one exporter a module."""

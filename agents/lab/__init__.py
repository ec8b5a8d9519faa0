"""A small real pipeline-parallel engine to watch, and the faults to put into it."""

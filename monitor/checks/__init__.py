"""The checks: one module each, registered in `stagewatch.monitor.checks.registry`."""

"""Grafana over its HTTP API: what `stagewatch grafana` applies and removes."""

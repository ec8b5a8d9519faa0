"""Grafana dashboards and alert rules, built in Python."""

"""Pipelines: schedules as tables, run by one program for all stages."""

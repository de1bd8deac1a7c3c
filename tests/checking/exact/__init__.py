"""Tests of exact numbers."""

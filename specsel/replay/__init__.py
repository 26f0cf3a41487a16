"""Exact replay of a choice rule on a position log."""

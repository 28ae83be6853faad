"""Turns results into tables and plots; knows no torch."""

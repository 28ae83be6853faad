"""Turns results into tables and charts; needs no torch."""

"""Turns results into tables and plots; knows no torch."""

# of the files that charts are drawn into
PICTURES = (".svg", ".png", ".pdf")

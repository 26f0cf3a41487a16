"""What the book and the command line compute from a log."""

"""One command for all the others: ``kvtape COMMAND …``."""

"""``kvtape COMMAND …``: a command for all the others."""

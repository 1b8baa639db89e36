"""Points of a sweep, measured or forecast: their measures with intervals, the Pareto set, one table and one page."""

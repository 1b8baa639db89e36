"""A sweep of loads: its runs read, its points, Pareto sets, labels against each other, and the verdict."""

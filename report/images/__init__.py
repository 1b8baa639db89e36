"""Figures of the pages as SVG and PNG files."""

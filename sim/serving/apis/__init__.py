"""The APIs that ``sim serve`` speaks."""

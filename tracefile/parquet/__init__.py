"""Traces in columns: Parquet files, read and written by row group."""

"""The recorder process: exchanges become records, records become trace files."""

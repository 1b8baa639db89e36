"""Parts of the wire fuzzer."""

"""A trace in other people's formats: each module is a group of them, each format a function from records to lines."""

"""The admin process: health, metrics and the live page, made from numbers that the other processes push."""

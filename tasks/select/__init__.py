"""Which pictures are trained on: conditions, duplicates, caps, balance and limit; metadata only."""

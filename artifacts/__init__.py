"""The ground floor: content keys, the store, and the shard formats."""

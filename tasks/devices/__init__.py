"""Shards computed by models: a process per accelerator, and a Beam element per image shard."""

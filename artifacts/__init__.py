"""Content keys, the artifact store and the shard formats; imports only configs."""

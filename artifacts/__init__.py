"""Content keys, the artifact store and the shard formats; imports no other package of ours."""

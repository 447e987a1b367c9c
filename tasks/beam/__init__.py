"""Run one DoFn over many shards on the workers of a Beam runner."""

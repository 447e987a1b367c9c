"""One program over many devices: sharding rules, TPU specifications, agreement of hosts."""

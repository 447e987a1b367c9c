"""Single program, multiple data: sharding rules, TPU specifications, host coordination."""

"""Single program, multiple data: sharding rules, TPU slices, and attention on TPUs."""

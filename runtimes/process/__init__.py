"""The process of a job: job file, events, signals, ranks, launcher, collectives, compile cache."""

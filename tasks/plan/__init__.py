"""Plan a run without its accelerator: memory, time, disk and cost."""

"""What trains, draws and encodes: one objective, one loader, one loop, many thin runtimes."""

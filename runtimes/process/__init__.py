"""What a job's process is: its file, events, signals, ranks, and programs that it keeps."""

"""Configurations of kohya's scripts, diffusers' scripts and SimpleTuner as recipes."""

"""Installed drivers and software of hosts with Ascend NPUs or Gaudi accelerators."""

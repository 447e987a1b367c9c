"""What a machine with Ascend NPUs or Gaudis has installed."""

"""The checkout that this code is run from."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[1]

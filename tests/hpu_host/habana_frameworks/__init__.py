"""Of an emulated Gaudi host: see ../README.md."""

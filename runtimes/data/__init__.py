"""From latent shards to the batch of a step: order, reading, and what is made ready ahead."""

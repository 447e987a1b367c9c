"""Draw pictures: start noise, conditioning, the sampler's numbers, and the generate job."""

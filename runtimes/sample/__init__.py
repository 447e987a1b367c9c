"""Image sampling: initial noise, conditioning, scheduler coefficients and the generate job."""
